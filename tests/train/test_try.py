"""`draftsmith try`: methods side by side on prompts of one's own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from draftsmith.speculators.errors import ConfigError
from draftsmith.speculators.export import export_drafter
from draftsmith.speculators.families.eagle3 import Eagle3
from draftsmith.speculators.registry import config_for_target
from draftsmith.speculators.target.frozen_target import FrozenTarget
from draftsmith.train.cli import app
from draftsmith.train.commands.try_methods import _methods
from draftsmith.train.data.prepare import bad_rows
from draftsmith.train.pipeline.evaluate_again import _recipe
from tests.support.tokenizers import chat_bytes


@pytest.fixture(scope="module")
def folders(tiny_model, tmp_path_factory) -> tuple[str, str]:
    root = tmp_path_factory.mktemp("try")
    ends = dict(bos_token_id=256, eos_token_id=257, pad_token_id=258)
    model = tiny_model("qwen3", vocab_size=259, max_position_embeddings=1024, **ends)
    model.save_pretrained(root / "target")
    chat_bytes().save_pretrained(root / "target")
    target = FrozenTarget(model, [1, 2])
    torch.manual_seed(0)
    drafter = Eagle3(config_for_target(target, "eagle3", tap_layers=[1, 2])).attach(target)
    export_drafter(drafter, root / "head", dtype=torch.float32)
    return str(root / "target"), str(root / "head")


@pytest.mark.slow
def test_all_methods_and_a_drafter_stand_side_by_side(folders, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    target, head = folders
    rows = [{"messages": [{"role": "user", "content": text}]} for text in ("one", "two")]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    saved = tmp_path / "tried.json"
    options = ["--max-tokens=8", "--repeats=2", "--device=cpu", f"--json={saved}"]
    command = ["try", f"--model={target}", f"--drafter={head}", "--prompts=p.jsonl", *options]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    found = json.loads(saved.read_text())
    names = ["default", "ngram", "suffix", "lookahead", head]
    assert list(found) == [*names, "versions", "arguments"]
    assert found["arguments"]["max_tokens"] == 8
    rates = {name: found[name]["timings"]["tokens_per_second"] for name in names}
    tokens = [output["token_ids"] for output in found["default"]["outputs"]]
    for name in names:
        metrics = found[name]["metrics"]
        assert [output["token_ids"] for output in found[name]["outputs"]] == tokens
        assert len(tokens) == len(metrics["passes"]["speculative"]) == 2
        if name != "default":
            assert metrics["lossless"][0]["checked_prompts"] == 2
            assert not metrics["lossless"][0]["details"] and metrics["tokens_per_forward"] >= 1
            speedup = metrics["speedup_vs_autoregressive"]
            assert speedup["value"] == pytest.approx(rates[name] / rates["default"])
            assert speedup["low"] <= speedup["value"] <= speedup["high"]
    assert all(name in done.output for name in names[:4])


def test_a_drafter_is_given_once():
    assert (
        _methods([], None)["suffix"]["suffix_decoding_max_cached_requests"] == 0
    )  # repeats are alike
    assert _methods(["a", "b"], 3)["b"] == {"model": "b", "num_speculative_tokens": 3}
    with pytest.raises(ConfigError, match="--drafter a"):
        _methods(["a", "a"], None)


def test_an_evaluation_without_a_recipe_keeps_its_files_in_out_and_names_its_options(tmp_path):
    made = _recipe("target", {"train": [{"path": "p.jsonl"}]}, {"temperatures": [0.0]}, tmp_path)
    log = bad_rows(made.data, Path(made.output_dir), "evaluation")
    assert log.path.parent == tmp_path
    with pytest.raises(ConfigError, match="--temperature"):
        _recipe("target", {"train": [{"path": "p.jsonl"}]}, {"temperatures": [-1.0]}, tmp_path)
