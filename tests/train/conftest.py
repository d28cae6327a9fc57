"""A target, a recipe and a drafter on disk, as the commands read them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from draftsmith.speculators.export import export_drafter
from draftsmith.speculators.registry import config_for_target, family_class
from draftsmith.speculators.target.frozen_target import FrozenTarget
from draftsmith.train.recipe.recipe import yaml_text
from tests.support.quickstart_data import source as quickstart
from tests.support.targets import save_target


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def recipe_file(tmp_path, target_folder) -> Path:
    path = tmp_path / "tiny.yaml"
    recipe = {
        "name": "tiny",
        "output_dir": str(tmp_path / "run"),
        "target": {"model": str(target_folder)},
        "drafter": {"draft_vocab_size": 64, "unroll_steps": 3},
        "data": {
            "train": [quickstart("train", 30)],
            "validation": [quickstart("validation", 6)],
            "max_length": 256,
        },
        "training": {"steps": 10, "batch_size": 2},
        "gates": {"t0.acceptance_length": {"min": 3.0}},
    }
    path.write_text(yaml_text(recipe))
    return path


@pytest.fixture
def drafter_folder(tmp_path, target_folder) -> Path:
    target = FrozenTarget.from_pretrained(str(target_folder))
    torch.manual_seed(0)
    drafter = family_class("eagle3")(
        config_for_target(target, "eagle3", draft_vocab_size=64)
    ).attach(target)
    return export_drafter(drafter, tmp_path / "drafter", dtype=torch.float32)
