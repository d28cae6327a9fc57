"""The frozen target: its features and logits, what is checked of it, packed rows, sharding, its sizes.

It serves training and inference alike.
No drafter and no loss belongs here.
"""
