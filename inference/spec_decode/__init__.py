"""Speculative decoding without an engine: proposals, trees, logits along drafts, replay.

Packages below it: who drafts, what is kept, how many are drafted.
No loading, no server and no report belongs here.
"""
