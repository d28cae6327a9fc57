"""The target's features of training rows: computed once, ahead, or cached on disk. It knows rows
and a target, no drafter and no loss."""
