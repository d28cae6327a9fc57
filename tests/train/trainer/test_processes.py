"""One recipe, any number of processes, whole or sharded, resumed on another: the same losses,
metrics and weights."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from torch.distributed.tensor import DTensor

from draftsmith.inference.progress import Stages
from draftsmith.speculators.drafter import Drafter
from draftsmith.speculators.errors import ConfigError
from draftsmith.speculators.target.frozen_target import FrozenTarget
from draftsmith.train.features.row_features import RowFeatures
from draftsmith.train.features.source import InProcess
from draftsmith.train.pipeline.data_stage import starts_sharded
from draftsmith.train.pipeline.drafter_stage import make_drafter
from draftsmith.train.pipeline.run import make_accelerator
from draftsmith.train.recipe.drafter_config import drafter_config
from draftsmith.train.trainer.parallel import shard_over_processes
from draftsmith.train.trainer.trainer import Trainer
from tests.support.errors import raises_at
from tests.support.models import make_tiny_model
from tests.support.training import assert_equal, make_recipe, make_rows, recipe_of
from tests.support.training import make_trainer as trainer_of
from tests.support.worlds import Scenario, in_worlds

FAMILIES = ("eagle3", "eagle", "medusa", "mlp", "mtp", "draft_model")
# DSpark has matrices of fewer rows than there are processes
BLOCK_WORLDS = dict.fromkeys(("peagle", "dflash", "dflash2"), (2, True)) | {"dspark": (4, True)}
JOINT = {"r": 4, "heads_schedule": "constant"}
FIGURES = (
    "loss",
    "grad_norm",
    "acceptance_rate",
    "top1_agreement",
    "in_loop_acceptance_length",
    "terms",
    "expected_acceptance_length",
    "on_policy",
    "rollout_acceptance_length",
)


class PowerCut(Exception):
    pass


def make_trainer(
    folder: Path,
    family: str,
    sharding: str = "none",
    joint: bool = False,
    on_policy: bool = False,
    **training,
) -> Trainer:
    sizes = {"steps": 4, "global_batch_size": 8, "batch_size": 4, "learning_rate": 1e-3}
    sizes |= {"muon_learning_rate": 1e-3, "eval_every": 2}
    if on_policy:
        sizes |= {"steps": 6, "batch_size": 2, "eval_every": None}
    texts = {"share": 0.6, "refresh_every": 2} if on_policy else None
    recipe = make_recipe(
        family, joint=JOINT if joint else None, on_policy=texts, **sizes | training
    )
    model = copy.deepcopy(make_tiny_model("llama", initializer_range=0.1))
    target = FrozenTarget(model, getattr(recipe.drafter, "tap_layers", None) or ())
    accelerator = Accelerator(cpu=True)
    shard_over_processes(accelerator, target, sharding)
    trainer = trainer_of(
        make_tiny_model,
        folder,
        recipe,
        make_rows(60),
        target=target,
        accelerator=accelerator,
        evaluate=size_of,
    )
    several = accelerator.num_processes > 1
    whole = [not isinstance(p, DTensor) for p in target.layers.parameters()]
    assert all(whole) != (several and sharding == "fsdp")
    sharded = several and "ACCELERATE_USE_FSDP" in os.environ
    assert all(isinstance(p, DTensor) for p in trainer.parameters) == sharded
    return trainer


def size_of(drafter: Drafter) -> dict[str, float]:
    """In place of a held-out evaluation: something of the whole drafter."""
    return {
        "expected_acceptance_length": sum(
            float(p.detach().double().abs().mean()) for p in drafter.parameters()
        )
    }


def train(
    folder: Path,
    family: str,
    run: str,
    stop_after: int | None = None,
    draws: int = 0,
    apart: bool = False,
    **training,
):
    """(figures of every step, weights) of a run, which ends after `stop_after` steps as by a power
    cut. `draws`: of random numbers beforehand, on which nothing may depend. `apart`: every process
    has a folder of its own."""
    torch.rand(draws)
    if apart:
        run += f" on machine {os.environ.get('RANK', 0)}"
    trainer = make_trainer(folder / run, family, **training)

    def advance(share: float, note: str) -> None:
        if trainer.state.step == stop_after:
            raise PowerCut

    try:
        history = trainer.run(advance).history
    except PowerCut:
        return [], {}
    if trainer.state.best_value is not None:
        trainer.load_best()
    weights = {name: tensor.numpy() for name, tensor in trainer.drafter.state_dict().items()}
    if trainer.joint is not None:
        adapter = trainer.joint.state_dict()
        weights |= {name: p.detach().numpy().copy() for name, p in adapter.items()}
    return [
        {name: np.asarray(record[name]) for name in FIGURES if name in record} for record in history
    ], weights


def scenario(family: str, processes: int, sharded: bool = False, **arguments) -> Scenario:
    name = f"{family}, {processes} {'sharded' if sharded else 'whole'}"
    name += "".join(f", {key}={value}" for key, value in arguments.items())
    run = arguments.pop("run", name)
    return Scenario(name, processes, sharded, {"family": family, "run": run, **arguments})


@pytest.mark.parametrize(
    ("changes", "sharded"),
    [
        ({"regenerate": {}}, False),  # it writes the responses
        ({"regenerate": {"endpoints": ["http://cluster:8000/v1"]}}, True),
        ({}, True),
        ({"validation": [{"path": "chats.jsonl"}]}, False),  # and those held out
        ({"init": "least_squares"}, False),  # features to fit the start to
        ({"processes": 1}, False),
        ({"sharding": "none"}, False),
    ],
)
def test_a_target_that_is_asked_for_nothing_starts_sharded(changes, sharded) -> None:
    data = {"train": [{"path": "chats.jsonl"}], "validation": changes.get("validation", [])}
    recipe = recipe_of(
        "eagle3",
        target={"model": "tiny", "sharding": changes.get("sharding", "fsdp")},
        data=data,
        drafter={"init": changes.get("init", "taps"), "norm_before_residual": True},
        regenerate=changes.get("regenerate", {"enabled": False}),
    )
    accelerator: Any = SimpleNamespace(num_processes=changes.get("processes", 2))
    assert starts_sharded(recipe, accelerator) is sharded


WORLDS = {  # beside one process
    family: [(2, False), (4, True)] if family == "eagle3" else [(2, True)] for family in FAMILIES
}
MOVES = {  # killed there, continued here
    "adamw": [((4, True), (2, False)), ((1, False), (4, True))],
    "muon": [((2, True), (1, False))],
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Every run of this file, in one set of processes."""
    scenarios = [
        scenario(family, *world) for family in FAMILIES for world in [(1, False), *WORLDS[family]]
    ]
    for optimizer, moves in MOVES.items():
        for number, (before, after) in enumerate(moves):
            named = {"run": f"{optimizer}-{number}", "optimizer": optimizer}
            scenarios.append(scenario("eagle3", *before, stop_after=3, **named))
            scenarios.append(scenario("eagle3", *after, **named))
    scenarios.append(scenario("eagle3", 2, True, sharding="fsdp"))
    for world in ((1, False), (2, True)):
        scenarios.append(scenario("eagle3", *world, optimizer="muon"))
        scenarios.append(scenario("eagle3", *world, on_policy=True))
    for on_policy in (False, True):
        cut = {"run": f"apart, {on_policy}", "apart": True, "on_policy": on_policy}
        scenarios.append(scenario("eagle3", 2, True, **cut, stop_after=3))
        scenarios.append(scenario("eagle3", 2, True, **cut))
    for family in BLOCK_WORLDS:
        for world in ((1, False), BLOCK_WORLDS[family]):
            scenarios.append(scenario(family, *world, optimizer="muon", steps=2))
    scenarios += [scenario("medusa", processes, joint=True) for processes in (1, 2)]
    cut = {"run": "joint-cut", "joint": True}
    scenarios.append(scenario("medusa", 1, **cut, stop_after=1))  # before its first checkpoint
    scenarios.append(scenario("medusa", 1, **cut, draws=7))
    return in_worlds(train, scenarios, tmp_path_factory.mktemp("worlds"), seconds=900)


def assert_same(
    one: tuple[list, dict], other: tuple[list, dict], what: str, atol: float = 1e-5
) -> None:
    assert len(one[0]) == len(other[0]) > 0, what
    for step, (expected, record) in enumerate(zip(one[0], other[0]), 1):
        assert expected.keys() == record.keys()
        for name, value in expected.items():
            text = f"{what}: {name} of step {step}"
            np.testing.assert_allclose(record[name], value, atol=atol, rtol=atol, err_msg=text)
    for name, tensor in one[1].items():
        text = f"{what}: {name}"
        np.testing.assert_allclose(other[1][name], tensor, atol=max(atol, 1e-4), err_msg=text)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_any_number_of_processes_trains_the_same_head(runs, family):
    """Whole and sharded, one family on 4 processes too: losses, metrics and weights."""
    for world in WORLDS[family]:
        name = scenario(family, *world).name
        assert_same(runs[f"{family}, 1 whole"], runs[name], name)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", MOVES)
def test_a_killed_run_continues_on_another_number_of_processes(runs, optimizer):
    alone = runs["eagle3, 1 whole" + (", optimizer=muon" if optimizer == "muon" else "")]
    for number, (_, after) in enumerate(MOVES[optimizer]):
        name = scenario("eagle3", *after, run=f"{optimizer}-{number}", optimizer=optimizer).name
        assert_same(alone, runs[name], name, atol=1e-5 if optimizer == "adamw" else 1e-3)


@pytest.mark.slow
def test_muon_of_shards_is_muon(runs):
    """Its products are bfloat16: a last bit of a gradient may become one of those."""
    alone = runs["eagle3, 1 whole, optimizer=muon"]
    assert_same(alone, runs["eagle3, 2 sharded, optimizer=muon"], "muon", atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("family", BLOCK_WORLDS)
def test_block_families_sharded_under_muon_train_the_same_head(runs, family):
    """Rows and columns among their weights included."""
    short = {"optimizer": "muon", "steps": 2}
    alone, sharded = (
        runs[scenario(family, *world, **short).name] for world in ((1, False), BLOCK_WORLDS[family])
    )
    assert_same(alone, sharded, family, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("on_policy", [False, True])
def test_a_killed_run_goes_on_where_the_first_process_alone_has_its_folder(runs, on_policy):
    """Its checkpoint, the best weights and texts written on policy are sent to the others."""
    alone = runs["eagle3, 1 whole" + (", on_policy=True" if on_policy else "")]
    cut = {"run": f"apart, {on_policy}", "apart": True, "on_policy": on_policy}
    assert_same(alone, runs[scenario("eagle3", 2, True, **cut).name], "apart")


@pytest.mark.slow
def test_a_sharded_target_says_the_same(runs):
    assert_same(runs["eagle3, 1 whole"], runs["eagle3, 2 sharded, sharding=fsdp"], "target")


@pytest.mark.slow
def test_a_target_trained_along_is_the_same_on_every_number_of_processes(runs):
    """The adapter as well as the heads; also if killed before the first checkpoint."""
    one = runs["medusa, 1 whole, joint=True"]
    assert any("lora_A" in name for name in one[1])
    assert_same(one, runs["medusa, 2 whole, joint=True"], "joint")
    again = runs[scenario("medusa", 1, run="joint-cut", joint=True, draws=7).name]
    for name, tensor in one[1].items():
        np.testing.assert_array_equal(again[1][name], tensor, err_msg=name)


def test_a_head_begins_with_the_same_weights_whatever_was_drawn_before(tmp_path):
    """In every process, and in a run that is continued."""
    recipe = recipe_of("eagle3", training={"seed": 3})
    states = []
    for before in (0, 1):
        model = make_tiny_model("llama")
        config = drafter_config(recipe, FrozenTarget(model))
        target = FrozenTarget(model, config.tap_layers)
        torch.manual_seed(before)
        features = RowFeatures(InProcess(target), make_rows())
        drafter = make_drafter(recipe, config, target, features, Stages())
        states.append(drafter.state_dict())
    assert_equal(*states)


@pytest.mark.slow
def test_on_policy_texts_are_those_of_one_process(runs):
    alone = runs["eagle3, 1 whole, on_policy=True"]
    assert any(record["on_policy"] > 0 for record in alone[0])
    assert_same(alone, runs["eagle3, 2 sharded, on_policy=True"], "on-policy")


@pytest.mark.parametrize("kind", ["DEEPSPEED", "MEGATRON_LM", "FSDP"])
def test_sharding_that_is_not_supported_is_refused_before_anything_is_done(monkeypatch, kind):
    monkeypatch.setenv(f"ACCELERATE_USE_{kind}", "true")
    monkeypatch.delenv("FSDP_VERSION", raising=False)  # the first, by accelerate's default
    with raises_at(ConfigError, "accelerate"):
        make_accelerator(recipe_of("eagle3"))
