"""A run on a LongRoPE target trains with one set of frequencies, and says how to serve them."""

from __future__ import annotations

import json

import pytest
import torch
from accelerate import Accelerator

from draftsmith.inference.progress import Stages
from draftsmith.speculators.export import read_fields
from draftsmith.train.pipeline.data_stage import DataStage
from draftsmith.train.pipeline.drafter_stage import make_drafter
from draftsmith.train.pipeline.export_stage import Trained, export
from draftsmith.train.pipeline.run_target import RunTarget
from draftsmith.train.recipe.drafter_config import drafter_config
from draftsmith.train.recipe.recipe import make_recipe
from draftsmith.train.trainer.checkpoint import TrainState
from tests.support.targets import save_target
from tests.support.training import NO_ROWS

ORIGINAL = 64
LONG = [1.0, 2.0, 4.0, 8.0]


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory):
    rope = dict(rope_type="longrope", rope_theta=1e4, short_factor=[1.0] * 4, long_factor=LONG)
    sizes = dict(original_max_position_embeddings=ORIGINAL, rope_parameters=rope)
    folder = tmp_path_factory.mktemp("target")
    return save_target(folder, "phi3", sliding_window=None, **sizes)


@pytest.mark.parametrize(
    "max_length, factors, served", [(48, [1.0] * 4, f"--max-model-len {ORIGINAL}"), (96, LONG, "")]
)
def test_target_writer_and_drafter_of_a_run_turn_alike(
    target_folder, tmp_path, capsys, max_length, factors, served
):
    (tmp_path / "chats.jsonl").write_text(json.dumps({"prompt": "a", "completion": "b"}) + "\n")
    data = {"train": [{"path": str(tmp_path / "chats.jsonl")}], "max_length": max_length}
    tree = {"name": "x", "output_dir": str(tmp_path / "run"), "data": data}
    recipe = make_recipe(tree | {"target": {"model": str(target_folder)}}).resolved()
    accelerator, stages = Accelerator(cpu=True), Stages()
    config = drafter_config(recipe, recipe.target.sketch("cpu")).model_copy(
        update={"draft_vocab_size": 4096}
    )
    target = RunTarget(recipe, accelerator, config.tap_layers, stages).whole()
    tokenizer = recipe.target.load_tokenizer()
    writer = DataStage(recipe, target, tokenizer, accelerator, stages)
    drafter = make_drafter(recipe, config, target, NO_ROWS, stages)
    expected = 1e4 ** -(torch.arange(4) / 4) / torch.tensor(factors)
    for rotary in (target.decoder.rotary_emb, drafter.positions.rotary_emb):
        torch.testing.assert_close(rotary.inv_freq, expected)
    assert writer.llm.engine.max_model_len == max(max_length, ORIGINAL)
    trained = Trained(drafter, TrainState(step=1), tokenizer, {})
    section = read_fields(export(recipe, trained))["draftsmith"]
    assert section["longrope_length"] == max(max_length, ORIGINAL)
    output = " ".join(capsys.readouterr().out.split())
    assert "LongRoPE" in output and served in output
