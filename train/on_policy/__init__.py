"""Training on text generated with the current drafter.

It asks the engine for texts.
No optimizer belongs here.
"""
