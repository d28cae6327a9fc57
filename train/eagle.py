"""Train an EAGLE-family head: `accelerate launch train/eagle.py RECIPE.yaml [KEY=VALUE ...]`."""

import sys

from draftsmith.train.cli import app

if __name__ == "__main__":
    app(["train", *sys.argv[1:]])
