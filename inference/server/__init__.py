"""The OpenAI-compatible server: routes, streams and metrics.

It knows HTTP and the engine's thread. Sampling and verification belong to the engine.
"""
