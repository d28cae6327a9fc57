"""From logits to a token: the one definition of p and q. It knows no proposal and no engine."""
