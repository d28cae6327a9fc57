"""Real vLLM as an engine, in a process of its own, which imports nothing of this project."""
