"""`LLM` and what it is put together from: loading, prompts, options under vLLM's names.

It turns a user's arguments into an engine.
No round of the engine and no HTTP belongs here.
"""
