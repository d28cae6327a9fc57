"""The launcher: `accelerate launch train/eagle.py RECIPE.yaml [KEY=VALUE ...]`.

It is `draftsmith train` as a file, which accelerate starts in every process. The family is the
recipe's: `dflash.py`, `distill.py`, `dspark.py`, `medusa.py`, `mlp.py` and `mtp.py` are links to
this file, so that a command can name what it trains. Wheels hold copies in their place."""

import sys

from draftsmith.train.cli import app

if __name__ == "__main__":
    app(["train", *sys.argv[1:]])
