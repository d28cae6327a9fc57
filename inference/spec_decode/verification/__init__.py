"""Which drafts are accepted, and the token that follows. It knows no proposer, no engine."""
