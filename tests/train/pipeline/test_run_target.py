"""A training from disk needs a target's head alone: not its layers, nor the files they lie in."""

from __future__ import annotations

import gc
import io
import json
import shutil
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import save_file
from torch import nn

from draftsmith.inference.progress import Stages
from draftsmith.speculators.errors import CheckpointError, QuantisedTensors
from draftsmith.speculators.registry import config_for_target, family_class
from draftsmith.speculators.target.frozen_target import FrozenTarget
from draftsmith.speculators.target.sharding import is_sharded
from draftsmith.train.pipeline.data_stage import DataStage, config_sha256
from draftsmith.train.pipeline.export_stage import Trained, export
from draftsmith.train.pipeline.run_target import RunTarget, load_target
from draftsmith.train.pipeline.train_stage import train
from draftsmith.train.recipe.recipe import Recipe
from draftsmith.train.trainer.step_records import EXPECTED
from draftsmith.train.trainer.trainer import Trainer
from tests.support.errors import raises_at
from tests.support.models import make_tiny_model
from tests.support.quantised import quantise_head, save_quantised
from tests.support.quickstart_data import source as quickstart
from tests.support.targets import copy_tokenizer, keep_two_shards, save_target
from tests.support.training import assert_equal, recipe_of
from tests.support.worlds import Scenario, in_worlds

SIZES = {"vocab_size": 4096, "max_position_embeddings": 512, "eos_token_id": 2}
LAYERS = 94  # as Qwen3-235B-A22B has


def recipe_from_disk(folder: Path, **sections: Any) -> Recipe:
    fields = {
        "target": {"model": str(folder / "target")},
        "output_dir": str(folder / "run"),
        "data": {
            "train": [quickstart("train", 6)],
            "validation": [quickstart("validation", 2)],
            "max_length": 128,
        },
        "drafter": {"unroll_steps": 2, "draft_vocab_size": 256, "tap_layers": [2, 47, 91]},
        "regenerate": {"max_new_tokens": 4},
        "features": {"mode": "cache", "encoding": "rotated"},
        "training": {"steps": 3, "batch_size": 1, "eval_every": 3, "mixed_precision": "no"},
        "evaluation": {"max_tokens": 4, "num_speculative_tokens": 2},
    }
    return recipe_of("eagle3", **fields | sections)


def trained(recipe: Recipe) -> Trained:
    torch.manual_seed(0)
    return train(recipe, Accelerator(cpu=True), Stages(enabled=False))


def decoder_layers() -> int:
    """Layers of the target with weights in memory."""
    gc.collect()
    modules = [item for item in gc.get_objects() if isinstance(item, nn.Module)]
    layers = [item for item in modules if type(item).__name__ == "Qwen3MoeDecoderLayer"]
    return sum(not next(layer.parameters()).is_meta for layer in layers)


def figures(result: Trained) -> list[tuple[float, float | None]]:
    return [(record["loss"], record.get(EXPECTED)) for record in result.state.history]


@pytest.mark.slow
def test_a_training_from_disk_needs_two_shards_of_a_hundred_and_holds_no_layer(
    tmp_path, monkeypatch
):
    """What the whole target has written is on the disk; the same training then goes on without it,
    to the same weights and the same held-out figures."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    model = make_tiny_model("qwen3_moe", num_hidden_layers=LAYERS, **experts, **SIZES)
    copy_tokenizer(keep_two_shards(model, tmp_path / "target", shards=100))
    model.save_pretrained(tmp_path / "whole")
    assert decoder_layers() == LAYERS
    del model
    recipe = recipe_from_disk(tmp_path)
    load = FrozenTarget.from_pretrained
    with monkeypatch.context() as patch:
        elsewhere = lambda name, **options: load(str(tmp_path / "whole"), **options)
        patch.setattr(FrozenTarget, "from_pretrained", elsewhere)
        first = trained(recipe)
    expected = {name: tensor.clone() for name, tensor in first.drafter.state_dict().items()}
    before = figures(first)
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    del first

    with pytest.raises(CheckpointError):
        load(recipe.target.model)
    held = []
    step = Trainer.step
    counted = lambda self, share: held.append(decoder_layers()) or step(self, share)
    monkeypatch.setattr(Trainer, "step", counted)
    again = trained(recipe)
    assert held == [0, 0, 0]
    assert_equal(again.drafter.state_dict(), expected)
    assert figures(again) == before and before[-1][1] >= 1
    assert (export(recipe, again) / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("sections", "decodes"),
    [
        ({}, False),
        ({"features": {"mode": "online"}}, True),
        ({"on_policy": {}}, True),
        ({"stages": [{"name": "a"}, {"name": "b", "on_policy": {}}]}, True),
    ],
    ids=str,
)
def test_a_training_keeps_the_decoder_where_it_computes_or_decodes(tmp_path, sections, decodes):
    assert recipe_from_disk(tmp_path, **sections).trains_with_decoder == decodes


def test_a_run_with_servers_refuses_a_quantised_head_and_does_not_load_the_whole(
    tmp_path, monkeypatch
):
    model = make_tiny_model("qwen3")
    folder = tmp_path / "target"
    save_quantised(model, folder, "fp8")
    quantise_head(folder)
    monkeypatch.delattr(FrozenTarget, "from_pretrained")
    features = {"engine": "vllm", "endpoints": ["http://a/v1"]}
    recipe = recipe_from_disk(tmp_path, features=features)
    with raises_at(QuantisedTensors, f"target {folder}"):
        RunTarget(recipe, Accelerator(cpu=True), (1, 2), Stages(enabled=False))


def loaded_in_shards(folder: Path, name: str) -> tuple[str, bool, dict[str, Any]]:
    """What is said while a target is loaded that is to be sharded; if it is in shards then; the
    weights of a student that is cut from it."""
    recipe = recipe_of(
        "draft_model",
        target={"model": str(folder / name), "sharding": "fsdp"},
        drafter={"from_target": [0, 2]},
        regenerate={"enabled": False},
    )
    output = io.StringIO()
    with redirect_stdout(output):
        target = load_target(recipe, Accelerator(cpu=True), (), Stages())
    student = {name: tensor.numpy() for name, tensor in student_of(recipe, target).items()}
    return output.getvalue(), is_sharded(target), student


def student_of(recipe: Recipe, target: FrozenTarget) -> dict[str, torch.Tensor]:
    family = family_class(recipe.family)
    shape = recipe.drafter.shape(family.config_class.model_fields, target)
    student = family(config_for_target(target, recipe.family, **shape)).attach(target)
    return student.initialise_from(target, recipe.drafter).state_dict()


@pytest.mark.slow
def test_load_target_with_sharding_reads_shards_or_says_that_it_reads_the_whole(tmp_path):
    model = make_tiny_model("qwen3")
    model.save_pretrained(tmp_path / "plain")
    save_quantised(model, tmp_path / "fp8", "fp8")
    scenarios = [Scenario(name, 2, arguments={"name": name}) for name in ("plain", "fp8")]
    results = in_worlds(loaded_in_shards, scenarios, tmp_path)
    output, in_shards, student = results["plain"]
    assert in_shards
    assert "the whole target" not in output
    recipe = recipe_of("draft_model", drafter={"from_target": [0, 2]})
    weights = {name: torch.from_numpy(array) for name, array in student.items()}
    assert_equal(weights, student_of(recipe, FrozenTarget(model)))
    output, in_shards, _ = results["fp8"]
    assert not in_shards
    assert "the whole target" in output


def test_data_for_the_folder_of_an_adapter_go_by_the_config_of_its_base(tmp_path):
    """As a joint training with `export: adapter` leaves one."""
    base = save_target(tmp_path / "base")
    folder = tmp_path / "target"
    folder.mkdir()
    fields = {"base_model_name_or_path": str(base), "peft_type": "LORA"}
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    save_file({"weight": torch.zeros(1)}, folder / "adapter_model.safetensors")
    copy_tokenizer(folder)
    recipe = recipe_from_disk(tmp_path)
    tokenizer = recipe.target.load_tokenizer()
    data = DataStage(recipe, None, tokenizer, Accelerator(cpu=True), Stages(enabled=False))
    assert data.hashes.config == config_sha256(base)
