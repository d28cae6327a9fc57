"""The OpenAI-compatible server: routes, streams and metrics.

It knows HTTP and the engine's thread; `api/` holds requests and answers as they are on the wire.
Sampling and verification belong to the engine.
"""
