"""Train a multi-token-prediction module: `accelerate launch train/mtp.py RECIPE.yaml
[training.steps=200 ...]`."""

from draftsmith.train.launch import launch

if __name__ == "__main__":
    launch(families=("mtp",))
