"""Who drafts. No verification rule belongs here, and nothing here commits a token."""
