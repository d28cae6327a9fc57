"""How many tokens a round drafts and verifies: fixed, by batch size, or what pays now.

Estimates of acceptance and of a round's cost, learnt while it runs.
No rule of verification and no model belongs here.
"""
