"""Training on the drafter's own drafts: rollouts, rejected branches, their weights.

It asks the engine for what is drafted and rejected.
No optimizer belongs here.
"""
