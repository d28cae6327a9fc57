"""The server compatible with OpenAI's: routes, streams, metrics, drafters swapped while it runs.

It knows HTTP and the engine's thread; requests and responses as they are on the wire are in `api/`.
Nothing here decides which token is written.
"""
