"""From logits to a token: processors, temperature and filters.

The one definition of p and q; a request's parameters go in.
No batch of requests, no proposal and no engine belongs here.
"""
