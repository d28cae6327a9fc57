"""Training on a device that is not there: no host tensor among its own, and few waits in a step,
for every family.

What is trained is what is trained on a CPU, so only that it runs, and what it waits for, is asked
here."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from draftsmith.inference.progress import Stages
from draftsmith.speculators.precision import to_device
from draftsmith.speculators.target.frozen_target import FrozenTarget
from draftsmith.train.data.packing import collate
from draftsmith.train.features.cache import FeatureCache
from draftsmith.train.features.row_features import RowFeatures
from draftsmith.train.features.source import Disk, InProcess
from draftsmith.train.losses.position_weights import PositionWeights
from draftsmith.train.pipeline.drafter_stage import make_drafter
from draftsmith.train.pipeline.held_out import held_out_evaluation
from draftsmith.train.pipeline.run_target import RunTarget
from draftsmith.train.recipe.drafter_config import drafter_config
from draftsmith.train.regeneration.store import Response
from draftsmith.train.trainer.trainer import Trainer
from tests.support.cases import OPT
from tests.support.device_emulation import DEVICE
from tests.support.features import make_key, write
from tests.support.fused_kernels import stand_in_for_attention, stand_in_for_compilers
from tests.support.models import make_tiny_model
from tests.support.targets import save_target
from tests.support.training import SHAPES, make_recipe, make_rows, recipe_of
from tests.support.training import make_trainer as trainer_of

TEXTS = {t: [Response.of("w", (5, 6, 7), (8, 9, 10, 11, 12), t)] for t in (0.0, 1.0)}
SMALL = {"draft_vocab_size": 60, "unroll_steps": 3}
FITTED = {**SMALL, "norm_before_residual": True, "init": "least_squares"}
NORMS, HEADS = {"fc_norm": True, "norm_output": True}, {"num_heads": 3, "unroll_steps": 3}
MUON = {"optimizer": "muon", "keep_features_gb": 1.0}
RECOMPUTED = {"activation_checkpointing": True, "gradient_accumulation_steps": 2}
Case = tuple[str, dict[str, Any], dict[str, Any]]  # family, drafter section, training section
CASES: dict[str, Case] = {
    "eagle3": ("eagle3", SMALL, {}),
    "eagle3, fitted": ("eagle3", FITTED, MUON),
    "eagle3, 3.1, fitted": ("eagle3", {**FITTED, **NORMS}, RECOMPUTED),
    "eagle3, own embeddings": ("eagle3", {**SMALL, "own_embeddings": True}, {}),
    "eagle": ("eagle", {}, RECOMPUTED),
    "eagle, HASS": ("eagle", {"unroll_steps": 3, "detach": True, "feature_noise": 0.0}, {}),
    "eagle, own embeddings": ("eagle", {"own_embeddings": True}, MUON),
    "eagle, pass through": ("eagle", {"init": "pass_through"}, {}),
    "medusa": ("medusa", HEADS, RECOMPUTED),
    "medusa, fitted": ("medusa", {**HEADS, "init": "least_squares"}, MUON),
    "mlp": ("mlp", {"inner_dim": 24}, MUON),
    "mlp, tied": ("mlp", {"inner_dim": 24, "tie_weights": True}, RECOMPUTED),
    "mtp": ("mtp", {}, MUON),
    "mtp, residual": ("mtp", {"hidden_state": "residual"}, RECOMPUTED),
    "dflash": ("dflash", {"unroll_steps": 3, "mask_token_id": 100}, {}),
    "peagle": ("peagle", {"unroll_steps": 3, "mask_token_id": 100}, {}),
    "draft_model, cut": ("draft_model", {"from_target": {"first": 2}}, RECOMPUTED),
    "draft_model, other": ("draft_model", {"config": {"model_type": "opt", **OPT}}, MUON),
}


class Accelerator:
    """accelerate's, as far as the loop asks, on the claimed device."""

    device, distributed_type, state = DEVICE, None, SimpleNamespace()
    num_processes, process_index, is_main_process = 1, 0, True

    def autocast(self):
        return contextlib.nullcontext()

    def log(self, *arguments, **named) -> None: ...
    def wait_for_everyone(self) -> None: ...


def on_device(name: str, **changed: Any):
    return make_tiny_model(name, **changed).to("cuda")


def make_trainer(
    folder: Path, family: str, drafter: dict[str, Any], training: dict[str, Any], rows=None
) -> Trainer:
    sizes = {"steps": 2, "eval_every": 2, **training}
    recipe = make_recipe(family, drafter=drafter, **sizes)
    probe = FrozenTarget(on_device("llama"))
    config = drafter_config(recipe, probe)
    target = FrozenTarget(probe.model, config.tap_layers)
    probe.close()
    rows = rows or make_rows()
    features = RowFeatures(
        InProcess(target), rows, keep_bytes=recipe.training.keep_features_gb * 2**30
    )
    trained = make_drafter(recipe, config, target, features, Stages(enabled=False))
    assert {p.device for p in trained.parameters()} == {DEVICE}
    return Trainer(
        recipe,
        target,
        trained,
        features,
        accelerator=Accelerator(),
        folder=folder,
        evaluate=held_out_evaluation(recipe, target, TEXTS),
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_every_family_trains_evaluates_and_saves(claimed_gpu, tmp_path, name):
    state = make_trainer(tmp_path, *CASES[name]).run()
    assert state.step == state.best_step == len(state.history) == 2
    assert all(0 < record["loss"] < 10 for record in state.history)


NEVER_WAIT = ["eagle3", "eagle", "eagle, HASS", "medusa", "mlp", "mtp", "dflash", "peagle"]
NEVER_WAIT += ["draft_model, cut"]


@pytest.mark.slow
@pytest.mark.parametrize("name", NEVER_WAIT)
def test_a_step_never_waits_and_is_read_at_once(claimed_gpu, tmp_path, name):
    """Whatever its rows and micro-steps; reading the figures of several steps waits once for
    each."""
    family, drafter, _ = CASES[name]
    training = {"steps": 9, "gradient_accumulation_steps": 2}
    trainer = make_trainer(tmp_path, family, drafter, training)
    if name == "eagle3":  # weights that are measured
        trainer.loss.position = PositionWeights.parse({"d_pace": 0.5})
    trainer.unread.append(trainer.step(0.1))  # what is looked up once is known
    with claimed_gpu.waits() as waits:
        trainer.unread.append(trainer.step(0.2))
    assert not waits, claimed_gpu.sites
    with claimed_gpu.waits() as waits:
        records, _ = trainer._read()
    assert dict(waits) == {"read": 2} and [record["step"] for record in records] == [1, 2]


@pytest.mark.slow
def test_the_clock_of_several_processes_is_read_at_once(claimed_gpu, tmp_path):
    trainer = make_trainer(tmp_path, "mlp", CASES["mlp"][1], {"steps": None, "max_minutes": 5})
    trainer.accelerator = SimpleNamespace(num_processes=2, device=DEVICE, gather=lambda own: own)
    with claimed_gpu.waits() as waits:
        assert trainer.share_done() == 0
    assert dict(waits) == {"read": 1}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_5", "falcon_h1"])
def test_features_of_a_recurrent_target_wait_for_nothing(claimed_gpu, name):
    """Whose texts run as rows of their own; a wait would hold the head's step up."""
    target = FrozenTarget(on_device(name))
    assert target.recurrent is not None
    batch = {key: to_device(x, DEVICE) for key, x in collate(make_rows()[:4]).items()}
    with claimed_gpu.waits() as waits:
        target.features(**batch)
    assert not waits, claimed_gpu.sites


# Operations of a step with the kernels of attention, by the family, its objective and layers
# eager and compiled; other work raises them.
LAUNCHES = {
    "eagle3": (860, 680),
    "dflash": (1580, 1170),
    "draft_model, cut": (500, 480),
    "mtp": (960, 800),
}


@pytest.mark.slow
@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("name", LAUNCHES)
def test_a_step_with_fused_attention_launches_no_more_than_it_did(
    claimed_gpu, monkeypatch, tmp_path, name, compiles
):
    family, drafter, _ = CASES[name]
    trainer = make_trainer(tmp_path, family, drafter, {"steps": 9})
    stand_in_for_attention(claimed_gpu, monkeypatch)
    if compiles:
        stand_in_for_compilers(claimed_gpu, monkeypatch)
    trainer.step(0.1)  # what is looked up once is known
    with claimed_gpu.launches() as launches, claimed_gpu.waits() as waits:
        trainer.step(0.2)
    assert not waits, claimed_gpu.sites
    assert launches.total() <= LAUNCHES[name][compiles], (
        launches.total(),
        launches.most_common(20),
    )


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(set(SHAPES) - {"mtp", "draft_model"}))
def test_texts_are_written_on_policy(claimed_gpu, tmp_path, family):
    recipe = make_recipe(family, on_policy={}, steps=3)
    state = trainer_of(on_device, tmp_path, recipe, accelerator=Accelerator()).run()
    assert any(record["on_policy"] for record in state.history)


@pytest.mark.slow
def test_a_target_trained_along(claimed_gpu, tmp_path):
    recipe = make_recipe("medusa", joint={"r": 4}, steps=2)
    target = FrozenTarget(on_device("qwen2"))
    trainer = trainer_of(on_device, tmp_path, recipe, target=target, accelerator=Accelerator())
    trainer.run()
    before, after = trainer.joint.held_out_loss([([5, 6, 7], [8, 9, 10, 11])])
    assert before != after


@pytest.mark.slow
def test_a_head_waits_on_the_host_while_the_whole_target_is_on_the_device(claimed_gpu, tmp_path):
    target = {"model": str(save_target(tmp_path))}
    recipe = recipe_of("eagle3", target=target, features={"mode": "cache"})
    held = RunTarget(recipe, Accelerator(), (1, 2), Stages(enabled=False))
    assert held.head.device == DEVICE
    assert held.whole().device == DEVICE
    assert held.head.device.type == "cpu"
    held.release()
    assert held.head.device == DEVICE


@pytest.mark.slow
def test_cached_features_come_back_to_the_device(claimed_gpu, tmp_path):
    rows, target = make_rows(), FrozenTarget(on_device("llama"), [1, 2, 3])
    write(FeatureCache(tmp_path, key := make_key("rotated")), rows, target)
    features = RowFeatures(Disk(FeatureCache(tmp_path, key).scan(), DEVICE), rows).of([0, 2])
    assert features.taps.device == features.last_hidden.device == DEVICE
    assert features.taps.isfinite().all()
