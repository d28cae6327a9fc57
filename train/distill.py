"""Distil a small model into a drafter: `accelerate launch train/distill.py RECIPE.yaml [key=value
...] [--dry-run]`."""

import sys

from draftsmith.train.cli import app

if __name__ == "__main__":
    app(["train", *sys.argv[1:]])
