"""Train Medusa heads: `accelerate launch train/medusa.py RECIPE.yaml [KEY=VALUE ...]`."""

import sys

from draftsmith.train.cli import app

if __name__ == "__main__":
    app(["train", *sys.argv[1:]])
