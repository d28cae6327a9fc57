"""The drafters, a family a file, and the two bases they share.

A family holds its config, its options and its head, and is found through `speculators/registry.py`.
No training loop, no verification and no file format belongs here.
"""
