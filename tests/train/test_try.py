"""`draftsmith try`: methods side by side on prompts of one's own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from draftsmith.speculators.errors import ConfigError, DataError
from draftsmith.train.cli import app
from draftsmith.train.commands.try_methods import _methods, _vocabulary
from draftsmith.train.data.prepare import bad_rows
from draftsmith.train.pipeline import evaluate_again
from draftsmith.train.pipeline.evaluate_again import (
    BUILT_IN,
    _recipe,
    evaluate_folders,
    prompts_of_file,
)
from tests.support.errors import raises_at
from tests.support.tokenizers import chat_bytes


@pytest.mark.slow
def test_all_methods_stand_side_by_side(tiny_model, tmp_path, monkeypatch):
    """With a drafter: tests/inference/test_offline.py."""
    monkeypatch.chdir(tmp_path)
    ends = dict(bos_token_id=256, eos_token_id=257, pad_token_id=258)
    tiny_model("qwen3", vocab_size=259, **ends).save_pretrained("target")
    chat_bytes().save_pretrained("target")
    rows = [{"messages": [{"role": "user", "content": text}]} for text in ("one", "two")]
    Path("p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = "--max-tokens=8 --repeats=1 --device=cpu --json=tried.json --prompts=p.jsonl"
    done = CliRunner().invoke(app, ["try", "--model=target", *options.split()])
    assert done.exit_code == 0, done.output
    results = json.loads(Path("tried.json").read_text())
    names = ["default", "ngram", "suffix", "lookahead"]
    assert list(results) == [*names, "versions", "arguments"]
    assert results["arguments"]["max_tokens"] == 8 and all(name in done.output for name in names)
    for name in names[1:]:
        (check,) = results[name]["metrics"]["lossless"]
        assert (check["checked_prompts"], check["details"]) == (2, [])


def test_evaluation_asks_for_prompts_where_the_default_ones_are_not(tmp_path, monkeypatch):
    assert all(Path(source["path"]).is_file() for source in BUILT_IN)
    monkeypatch.setattr(evaluate_again, "HELD_OUT", tmp_path / "test.jsonl.gz")
    with raises_at(ConfigError, "--prompts"):
        evaluate_folders("target", "head", None, tmp_path, [0.0])


def test_prompts_of_file_that_leave_no_room_name_the_option(target_folder, tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompt": "one"}\n')
    with raises_at(DataError, "--max-tokens"):
        prompts_of_file(str(target_folder), tmp_path / "p.jsonl", 1, 10**6)


def test_drafter_is_given_once():
    # so that repeats are alike
    assert _methods([], None, {})["suffix"]["suffix_decoding_max_cached_requests"] == 0
    assert _methods(["a", "b"], 3, {})["b"] == {"model": "b", "num_speculative_tokens": 3}
    with raises_at(ConfigError, "--drafter a"):
        _methods(["a", "a"], None, {})


def test_further_options_are_those_of_the_drafters():
    tree = {"speculative_eagle_topk": 2}
    methods = _methods(["a"], 3, tree)
    assert methods["a"] == {
        "model": "a",
        "num_speculative_tokens": 6,
        "speculative_num_steps": 3,
        **tree,
    }
    assert "speculative_eagle_topk" not in methods["ngram"]
    assert _methods(["a"], None, tree)["a"] == {"model": "a", **tree}
    with raises_at(ConfigError, "--speculative-config"):
        _methods([], None, tree)
    beside = _methods(["a"], None, {"with": "suffix"})["a"]
    assert beside["suffix_decoding_max_cached_requests"] == 0  # so that repeats are alike


def test_what_is_no_method_beside_a_head_is_left_to_the_check_of_the_options():
    assert _methods(["a"], None, {"with": "nope"})["a"] == {"model": "a", "with": "nope"}


def test_vocabulary_is_a_number_or_is_measured():
    assert _vocabulary("8192", ["a"], {}) == {"draft_vocab_size": 8192}
    assert _vocabulary("auto", ["a"], {}) == _vocabulary("", [], {}) == {}


@pytest.mark.parametrize(
    "asked, drafters, further",
    [
        ("auto", [], {}),
        ("0", ["a"], {}),
        ("-4", ["a"], {}),
        ("many", ["a"], {}),
        ("auto", ["a"], {"draft_vocab_size": 8}),
    ],
)
def test_vocabulary_of_nothing_or_of_no_size_is_refused(asked, drafters, further):
    with raises_at(ConfigError, f"--draft-vocab {asked}"):
        _vocabulary(asked, drafters, further)


def test_evaluation_without_a_recipe_keeps_its_files_in_out_and_names_its_options(tmp_path):
    recipe = _recipe("target", {"train": [{"path": "p.jsonl"}]}, {"temperatures": [0.0]}, tmp_path)
    log = bad_rows(recipe.data, Path(recipe.output_dir), use="evaluation")
    assert log.path.parent == tmp_path
    with pytest.raises(ConfigError, match="--temperature"):
        _recipe("target", {"train": [{"path": "p.jsonl"}]}, {"temperatures": [-1.0]}, tmp_path)
