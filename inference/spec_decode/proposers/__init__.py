"""Who drafts: a trained head, n-grams, suffixes or lookahead.

A proposer answers with a `Proposal`.
No verification rule belongs here, and nothing here commits a token.
"""
