"""One recipe, any number of processes: the same losses, metrics and weights, whole or sharded, resumed on another count."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file

from speculators.config import config_for_target
from speculators.drafter import family_class
from speculators.target import FrozenTarget
from tests.conftest import make_tiny_model
from tests.train.test_loop import make_rows
from tests.train.worlds import Scenario, in_worlds
from train import checkpoint
from train.loop import Trainer
from train.recipe import make_recipe

FAMILIES: dict[str, dict[str, Any]] = {  # drafter sections
    "eagle3": {"unroll_steps": 3, "draft_vocab_size": 60, "tap_layers": [1, 2, 3]},
    "eagle": {"unroll_steps": 2, "feature_noise": 0.1, "init": "pass_through"},
    "medusa": {"num_heads": 3, "unroll_steps": 3, "init": "target"},
    "mlp": {"unroll_steps": 3},
    "mtp": {"unroll_steps": 2},
    "draft_model": {"from_target": {"last": 2}},
}
FIGURES = ("loss", "grad_norm", "acceptance_rate", "top1_agreement", "in_loop_acceptance_length", "terms")


class PowerCut(Exception):
    pass


def make_trainer(folder: Path, family: str, evaluate=None, **training) -> Trainer:
    defaults = {"steps": 6, "global_batch_size": 8, "batch_size": 4, "learning_rate": 1e-2, "save_every": 2}
    recipe = make_recipe(
        {
            "name": "t",
            "family": family,
            "target": {"model": "tiny"},
            "data": {"train": [{"demo": {}}], "max_length": 48},
            "drafter": FAMILIES[family],
            "training": {**defaults, "mixed_precision": "no", **training},
        }
    )
    target = FrozenTarget(make_tiny_model("llama", initializer_range=0.1), FAMILIES[family].get("tap_layers", ()))
    made = family_class(family)
    shape = recipe.drafter.shape(made.config_class.model_fields, target)
    torch.manual_seed(0)
    drafter = made(config_for_target(target, family, **shape)).attach(target)
    drafter.initialise_from(target, recipe.drafter)
    accelerator = Accelerator(cpu=True)
    return Trainer(
        recipe, target, drafter, make_rows(60), accelerator=accelerator, folder=folder, evaluate=evaluate
    )


def train(folder: Path, family: str, run: str, stop_after: int | None = None, **training) -> tuple[list, dict]:
    """(figures of every step, weights) of a run, which ends after `stop_after` steps as by a power cut."""
    trainer = make_trainer(folder / run, family, **training)

    def advance(share: float, note: str) -> None:
        if trainer.state.step == stop_after:
            raise PowerCut

    try:
        history = trainer.run(advance).history
    except PowerCut:
        return [], {}
    weights = {name: tensor.numpy() for name, tensor in trainer.drafter.state_dict().items()}
    return [[np.asarray(record[name]) for name in FIGURES] for record in history], weights


def scenario(family: str, processes: int, sharded: bool = False, **arguments) -> Scenario:
    name = f"{family}, {processes} {'sharded' if sharded else 'whole'}" + "".join(f", {k}={v}" for k, v in arguments.items())
    run = arguments.pop("run", f"{family}-{processes}-{sharded}")
    return Scenario(name, processes, sharded, {"family": family, "run": run, **arguments})


def assert_same(one: tuple[list, dict], other: tuple[list, dict], what: str, atol: float = 1e-5) -> None:
    assert len(one[0]) == len(other[0]) > 0, what
    for step, (wanted, found) in enumerate(zip(one[0], other[0])):
        for name, a, b in zip(FIGURES, wanted, found):
            np.testing.assert_allclose(b, a, atol=atol, rtol=atol, err_msg=f"{what}: {name} of step {step + 1}")
    for name, tensor in one[1].items():
        np.testing.assert_allclose(other[1][name], tensor, atol=1e-4, err_msg=f"{what}: {name}")


@pytest.mark.slow
def test_any_number_of_processes_trains_the_same_head(tmp_path):
    """Every family, 1, 2 and 4 processes, whole and sharded."""
    scenarios = [scenario(f, n, s) for f in FAMILIES for n in (1, 2, 4) for s in (False, True) if n > 1 or not s]
    found = in_worlds(train, scenarios, tmp_path)
    for family in FAMILIES:
        alone = found[f"{family}, 1 whole"]
        for name, result in found.items():
            if name.startswith(f"{family},"):
                assert_same(alone, result, name)
