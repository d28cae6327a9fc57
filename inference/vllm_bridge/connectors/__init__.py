"""Modules that vLLM loads by path. They import nothing of this project."""
