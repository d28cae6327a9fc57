"""A tiny random target and a recipe for it: what whole jobs begin with."""

from __future__ import annotations

import pytest

from draftsmith.train.recipe.recipe import yaml_text
from tests.support.quickstart_data import source as quickstart
from tests.support.targets import save_target


@pytest.fixture(scope="module")
def tiny_target(tmp_path_factory):
    """A random model of 4 layers with the embedded target's tokenizer, saved as a user's would
    be."""
    return save_target(tmp_path_factory.mktemp("target"), num_hidden_layers=4)


@pytest.fixture
def recipe(tiny_target, tmp_path):
    source = quickstart("train", 12)
    content = {
        "name": "tiny",
        "output_dir": str(tmp_path / "run"),
        "target": {"model": str(tiny_target)},
        "drafter": {"unroll_steps": 3, "draft_vocab_size": 256, "tap_layers": [1, 2, 3]},
        "data": {
            "train": [source, quickstart("code-train", 3)],
            "validation": [quickstart("validation", 6)],
            "max_length": 256,
        },
        "regenerate": {"max_new_tokens": 12, "batch_size": 8},
        "training": {"steps": 4, "batch_size": 2, "eval_every": 2},
        "evaluation": {
            "prompts": [quickstart("test", 3)],
            "prompts_per_workload": 1,
            "max_tokens": 8,
            "repeats": 1,
            "num_speculative_tokens": 2,
        },
        "trackers": ["tensorboard"],
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml_text(content))
    return path
