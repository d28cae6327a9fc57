"""The target's features of training rows: computed once, ahead, or cached on disk.

It knows rows and a target.
No drafter and no loss belongs here.
"""
