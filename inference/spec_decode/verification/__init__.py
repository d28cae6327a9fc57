"""Verification: which drafts of a proposal are accepted, and the token that follows.

The rules are pure functions of p, q and drafts, for chains and for trees; random draws are
made in `rejection_sampler.py`. No proposer and no engine belongs here."""
