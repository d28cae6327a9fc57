"""`draftsmith prepare`: what it counts is what a run trains on, and it shows it at any width."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from transformers import AutoTokenizer
from typer.testing import CliRunner

from draftsmith.train.cli import app
from draftsmith.train.data.loss_mask import ConversationTokenizer
from draftsmith.train.data.packing import prepare_rows
from draftsmith.train.data.prepare import bad_rows, training_examples
from draftsmith.train.recipe.load import load_recipe
from tests.quickstart_data import source as quickstart
from tests.support.damaged_conversations import damaged

TARGET = Path(__file__).resolve().parents[3] / "recipes" / "quickstart" / "target"


@pytest.fixture
def recipe_file(tmp_path) -> Path:
    path = tmp_path / "chats.jsonl"
    path.write_bytes(b"\n".join(line for line, _ in damaged(100, seed=3, tokens=2000)))
    tree = {
        "name": "looked-at",
        "output_dir": str(tmp_path / "run"),
        "target": {"model": str(TARGET)},
        "data": {
            "train": [{"path": str(path), "weight": 2.0}, quickstart("train", 12)],
            "validation": [quickstart("validation", 6)],
            "max_length": 256,
            "on_bad_row": "drop",
        },
        "regenerate": {"enabled": False},
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def call(*arguments: object, width: int = 120, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["prepare", *map(str, arguments)], env={"COLUMNS": str(width)})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result.output


@pytest.mark.slow
def test_it_counts_what_a_run_trains_on(recipe_file, tmp_path):
    report = json.loads(call(recipe_file, "--json"))
    recipe = load_recipe(recipe_file)
    bad = bad_rows(recipe.data)
    examples = training_examples(recipe, bad).examples
    tokenizer = ConversationTokenizer(AutoTokenizer.from_pretrained(TARGET))
    rows, statistics = prepare_rows(examples, tokenizer, max_length=256, bad=bad)
    whole, parts = report["all"], report["workloads"].values()
    for name in ("rows", "tokens", "supervised", "truncated", "dropped_cut"):
        assert whole[name] == getattr(statistics, name) == sum(part[name] for part in parts), name
    lengths = sorted(map(len, rows))
    assert (whole["lengths"]["min"], whole["lengths"]["max"]) == (lengths[0], lengths[-1])
    (count,) = [item["count"] for item in report["left_out"] if item["why"] == "bad"]
    listing = tmp_path / "run" / "bad_rows.jsonl"
    assert len(listing.read_text().splitlines()) == len(bad.reasons) == count > 10
    assert str(listing) in report["lists"] and len(report["chat_template_sha256"]) == 64
    output = call(recipe_file, "data.on_bad_row=error", code=2)
    assert "data.on_bad_row" in output and f"{count:,}" in output, "all are shown all the same"


@pytest.mark.parametrize("width", [80, 120])
def test_it_shows_it_at_any_width(recipe_file, width):
    output = call(recipe_file, "--sample", 2, width=width)
    for word in ("workload", "superv.", "median", "Left out", "not JSON", "(green)"):
        assert word in " ".join(output.split()), word
    assert all(len(line) <= width for line in output.splitlines() if "lists them" not in line)


def test_prompts_and_held_out_texts_can_be_looked_at_too(recipe_file):
    output = call(recipe_file, "regenerate.enabled=true")
    assert "the target write the responses anew" in output
    output = call(recipe_file, "--validation")
    assert "chats" not in output and "Left out" not in output


def test_prepare_shows_what_the_run_leaves_out_and_asks_for(recipe_file, tmp_path):
    """Prompts too long for the last turn, and for every turn; responses at most max_new_tokens."""

    def turns(*texts: str) -> str:
        roles = ("user", "assistant")
        messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
        return json.dumps({"messages": messages})

    long = "number and " * 200
    path = tmp_path / "long.jsonl"
    path.write_text(
        "\n".join([turns(long, "yes"), turns("one", "two", long, "no"), turns("a", "b " * 99)])
    )
    tree = yaml.safe_load(recipe_file.read_text())
    tree["data"] |= {"train": [{"path": str(path)}], "max_length": 256}
    tree["regenerate"] = {"enabled": True, "max_new_tokens": 20}
    recipe_file.write_text(yaml.safe_dump(tree))
    report = json.loads(call(recipe_file, "--json"))
    assert report["all"]["rows"] == 2 and report["earlier_turns"] == 1
    assert report["all"]["supervised"] <= 2 * 20
    assert [item["count"] for item in report["left_out"] if "prompt" in item["why"]] == [1]
    output = call(recipe_file)
    assert "an earlier turn" in output and "leaves no room" in output


def test_terminals_obey_nothing_that_a_text_says(recipe_file, tmp_path):
    turns = [
        {"role": "user", "content": "Hi \x1b[31m"},
        {"role": "assistant", "content": "[bold]Yes[/bold]\x07"},
    ]
    path = tmp_path / "odd.jsonl"
    path.write_text(json.dumps({"messages": turns}))
    output = call(recipe_file, f"data.train=[{{path: {path}}}]")
    assert "\x1b[31m" not in output and "\x07" not in output
    assert "␛[31m" in output and "[bold]Yes[/bold]␇" in output
