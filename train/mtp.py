"""Train a multi-token-prediction module: `accelerate launch train/mtp.py RECIPE.yaml
[training.steps=200 ...]`."""

import sys

from draftsmith.train.cli import app

if __name__ == "__main__":
    app(["train", *sys.argv[1:]])
