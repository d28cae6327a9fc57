"""Training on texts that the drafter in training had a part in.

It asks the engine for texts.
No optimizer belongs here.
"""
