"""`export --quantize`: an export that loses too much acceptance is not written."""

from __future__ import annotations

import json

import pytest
import torch

from draftsmith.inference.evaluation.evaluate import EvaluationSettings
from draftsmith.speculators.errors import ConfigError
from draftsmith.speculators.export import export_drafter, read_drafter_config
from draftsmith.train.pipeline.quantise_stage import HeldOut, quantise_export
from tests.support.cases import BASE, CASES, make
from tests.support.errors import raises_at

PROMPTS = [[5, 6, 7, 5, 6, 7, 5], [9, 8, 3]]


@pytest.mark.slow
def test_quantise_export_keeps_the_old_folder_where_the_loss_is_too_large(tiny_model, tmp_path):
    model = tiny_model("llama")
    model.save_pretrained(tmp_path / "target")
    _, drafter = make(CASES[BASE["eagle3"]], model)
    plain = export_drafter(drafter, tmp_path / "plain", dtype=torch.float32)
    out = tmp_path / "out"
    out.mkdir()
    (out / "config.json").write_text('{"draftsmith": {}}')
    settings = EvaluationSettings(max_tokens=12, num_speculative_tokens=2)
    held_out = HeldOut(str(tmp_path / "target"), PROMPTS, settings, {})
    with raises_at(ConfigError, "--quantize"):
        quantise_export(plain, out, held_out, "int8", -1.0)  # it would have to double
    assert [path.name for path in out.iterdir()] == ["config.json"]
    change = quantise_export(plain, out, held_out, "int8", 1.0)
    assert change.texts == 2 * len(PROMPTS) and change.before >= 1 and change.loss < 1
    assert read_drafter_config(out).quantization == "int8"
    with raises_at(ConfigError, "--quantize"):
        quantise_export(out, tmp_path / "twice", held_out, "int8", 1.0)
    assert not (tmp_path / "twice").exists()


def test_held_out_for_an_export_needs_prompts_and_a_target(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({}))
    with raises_at(ConfigError, "--quantize"):
        HeldOut.for_export(tmp_path, "", None)
    with raises_at(ConfigError, "--quantize"):
        HeldOut.for_export(tmp_path, "", tmp_path / "prompts.jsonl")
