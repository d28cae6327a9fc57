"""Train Medusa heads: `accelerate launch train/medusa.py RECIPE.yaml [training.steps=200 ...]
[--dry-run]`."""

from draftsmith.train.launch import launch

if __name__ == "__main__":
    launch(families=("medusa",))
