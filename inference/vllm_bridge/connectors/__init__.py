"""Modules that vLLM loads by path.

They import vLLM and nothing of this project.
Nothing that this project imports belongs here.
"""
