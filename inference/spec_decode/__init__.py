"""Speculative decoding without an engine: who drafts, how many, and what is kept."""
