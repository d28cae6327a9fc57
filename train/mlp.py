"""Train an MLP speculator: `accelerate launch train/mlp.py RECIPE.yaml [KEY=VALUE ...]`."""

import sys

from draftsmith.train.cli import app

if __name__ == "__main__":
    app(["train", *sys.argv[1:]])
