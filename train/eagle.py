"""Train an EAGLE-family head: `accelerate launch train/eagle.py RECIPE.yaml [training.steps=200
...] [--dry-run]`."""

from draftsmith.train.launch import launch

if __name__ == "__main__":
    launch(families=("eagle", "eagle3", "peagle"))
