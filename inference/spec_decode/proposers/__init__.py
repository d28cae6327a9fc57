"""Who drafts: a trained head, n-grams, suffixes, lookahead, or two of them side by side.

A proposer answers with a `Proposal`.
No verification rule belongs here, and nothing here commits a token.
"""
