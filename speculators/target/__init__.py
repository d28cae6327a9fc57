"""The frozen target: its features and logits, the probes of its model, plain layers, packed rows,
sharding, its sizes.

Training and inference share it.
Drafters and losses belong elsewhere.
"""
