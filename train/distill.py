"""Distil a small model into a drafter: `accelerate launch train/distill.py RECIPE.yaml [key=value
...] [--dry-run]`."""

from draftsmith.train.launch import launch

if __name__ == "__main__":
    launch(families=("draft_model",))
