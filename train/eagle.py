"""Train an EAGLE-family head: `accelerate launch train/eagle.py recipes/quickstart/eagle3.yaml [training.steps=200 ...]`."""

from train.run import launch

if __name__ == "__main__":
    launch(families=("eagle3",))
