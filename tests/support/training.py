"""Trainings of tiny drafters: rows with something to learn, recipes, trainers, and a power cut."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator

from draftsmith.speculators.registry import config_for_target, family_class
from draftsmith.speculators.target.frozen_target import FrozenTarget
from draftsmith.train.data.loss_mask import TokenRow
from draftsmith.train.data.packing import PackedRow, pack
from draftsmith.train.features.row_features import RowFeatures
from draftsmith.train.features.source import InProcess
from draftsmith.train.on_policy.refresh import OnPolicy
from draftsmith.train.recipe.recipe import Recipe, recipe_class
from draftsmith.train.trainer.joint_target import JointTarget
from draftsmith.train.trainer.trainer import Trainer

TAPS = {"tap_layers": [1, 2, 3]}
BLOCK = {"unroll_steps": 3, "mask_token_id": 100, "block_size": 4, "num_layers": 1, **TAPS}
SHAPES: dict[str, dict[str, Any]] = {  # drafter sections
    "eagle3": {"unroll_steps": 3, "draft_vocab_size": 60, **TAPS},
    "eagle": {"unroll_steps": 2, "feature_noise": 0.1, "init": "pass_through"},
    "medusa": {"num_heads": 3, "unroll_steps": 3, "init": "target"},
    "mlp": {"inner_dim": 24, "unroll_steps": 3},
    "mtp": {"unroll_steps": 2},
    "draft_model": {"from_target": {"last": 2}},
    "dflash": BLOCK,
    "dflash2": BLOCK,
    "dspark": {**BLOCK, "markov_rank": 3},
    "peagle": {"mask_token_id": 100, "draft_vocab_size": 60, "num_depths": 3, **TAPS},
}
NO_ROWS: Any = SimpleNamespace(rows=[])  # features of a training without rows
TEXTS = {"prompts": 5, "max_new_tokens": 14, "refresh_every": 3, "share": 0.7}  # on policy


def make_rows(count: int = 24, vocab: int = 100) -> list[PackedRow]:
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(count):
        length = int(rng.integers(8, 24))
        ids = rng.integers(3, vocab, length)
        ids[1:] = (ids[:-1] * 7 + 3) % vocab  # something to learn
        rows.append(TokenRow(ids, np.arange(length) >= 3))
    return pack(rows, 48)


def recipe_of(family: str, **sections: Any) -> Any:
    """The recipe of a family with these sections, and the least that every recipe says."""
    data = {"train": [{"path": "chats.jsonl"}], "max_length": 48}
    least = {"name": "t", "family": family, "target": {"model": "tiny"}, "data": data}
    return recipe_class(family).model_validate(least | sections).resolved()


def make_recipe(
    family: str = "eagle3",
    *,
    drafter: dict | None = None,
    on_policy: dict | None = None,
    joint: dict | None = None,
    **training,
) -> Recipe:
    defaults = {"steps": 8, "batch_size": 2, "learning_rate": 1e-2, "save_every": 2}
    defaults["preset"] = "published"
    return recipe_of(
        family,
        drafter=SHAPES[family] if drafter is None else drafter,
        loss={"forward_kl": 1.0},
        regenerate={"batch_size": 3},
        evaluation={"num_speculative_tokens": 2},
        on_policy=None if on_policy is None else TEXTS | on_policy,
        joint=joint,
        training={**defaults, "mixed_precision": "no", **training},
    )


def make_trainer(
    make_model: Any,
    folder: Path,
    recipe: Recipe,
    rows: list[PackedRow] | None = None,
    *,
    target: FrozenTarget | None = None,
    accelerator: Any = None,
    **more: Any,
) -> Trainer:
    """`more`: of the Trainer. Starting weights are drawn from the number of the process."""
    accelerator = accelerator or Accelerator(cpu=True)
    if target is None:
        model = make_model("llama", initializer_range=0.1)
        model = copy.deepcopy(model) if recipe.joint else model
        target = FrozenTarget(model, getattr(recipe.drafter, "tap_layers", None) or ())
    torch.manual_seed(accelerator.process_index)
    family = family_class(recipe.family)
    shape = recipe.drafter.shape(family.config_class.model_fields, target)
    drafter = family(config_for_target(target, recipe.family, **shape)).attach(target)
    drafter.initialise_from(target, recipe.drafter)
    if recipe.joint:
        more["joint"] = JointTarget(target, recipe.joint, accelerator.process_index)
    if recipe.on_policy:
        ids = np.random.default_rng(1)
        prompts = [tuple(ids.integers(3, 100, int(ids.integers(1, 9))).tolist()) for _ in range(7)]
        texts = OnPolicy(recipe, target, prompts, folder=folder, accelerator=accelerator)
        more["on_policy"] = texts
    required = {"accelerator": accelerator, "folder": folder, "fingerprint": "a"}
    features = more.pop("features", None) or RowFeatures(InProcess(target), rows or make_rows())
    return Trainer(recipe, target, drafter, features, **required, **more)


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.drafter.state_dict().items()}


def assert_equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    torch.testing.assert_close(a, b, atol=0, rtol=0)


def cut_off(trainer: Trainer, step: int) -> None:
    """Runs it until it dies after this step."""

    def die(share, note):
        if trainer.state.step == step:
            raise RuntimeError("power cut")

    with pytest.raises(RuntimeError, match="power cut"):
        trainer.run(die)
