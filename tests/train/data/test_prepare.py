"""`draftsmith prepare`: what it counts is what a run trains on; a terminal obeys nothing of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from draftsmith.train.data.loss_mask import ConversationTokenizer
from draftsmith.train.data.packing import prepare_rows
from draftsmith.train.data.prepare import bad_rows, training_examples
from draftsmith.train.recipe.load import load_recipe
from draftsmith.train.recipe.recipe import yaml_text
from tests.quickstart_data import source as quickstart
from tests.support.damaged_conversations import BAD, WHOLE
from tests.support.targets import TOKENIZER
from tests.train.test_cli import call, refused


@pytest.fixture
def recipe_file(tmp_path) -> Path:
    path = tmp_path / "chats.jsonl"
    path.write_bytes(b"\n".join([*WHOLE.values(), *BAD.values()]))
    tree = {
        "name": "looked-at",
        "output_dir": str(tmp_path / "run"),
        "target": {"model": str(TOKENIZER)},
        "data": {
            "train": [{"path": str(path), "weight": 2.0}, quickstart("train", 12)],
            "validation": [quickstart("validation", 6)],
            "max_length": 256,
            "on_bad_row": "drop",
            "max_bad_row_share": 1.0,
        },
        "regenerate": {"enabled": False},
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml_text(tree))
    return path


@pytest.mark.slow
def test_it_counts_what_a_run_trains_on(recipe_file, tmp_path):
    code, output = call("prepare", recipe_file, "--sample", 0)
    recipe = load_recipe(recipe_file)
    bad = bad_rows(recipe.data)
    examples = training_examples(recipe, bad).examples
    tokenizer = ConversationTokenizer(AutoTokenizer.from_pretrained(TOKENIZER))
    rows, statistics = prepare_rows(examples, tokenizer, max_length=256, bad=bad)
    assert code == 0 and str(statistics) in output and "(green)" in output
    assert f"max {max(map(len, rows))}" in output
    listing = tmp_path / "run" / "bad_rows.jsonl"
    assert len(listing.read_text().splitlines()) == len(bad.reasons) > 10
    assert str(listing) in output.replace("\n", "")
    assert "data.on_bad_row" in call("prepare", recipe_file, "data.on_bad_row=error")[1]
    code, output = call("prepare", recipe_file, "data.max_bad_row_share=0.1")
    assert code == 2 and "data.max_bad_row_share" in output


def test_prompts_and_held_out_texts_can_be_looked_at_too(recipe_file, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "user", "content": "Say hello."}]}) + "\n")
    override = f"data.train=[{{path: {path}}}]"
    code, output = call("prepare", recipe_file, override, "regenerate.enabled=true")
    assert code == 0 and "1 prompts" in output and "Say hello." in output
    assert "no assistant turn" in refused("prepare", recipe_file, override)
    assert "6 examples" in call("prepare", recipe_file, "--validation")[1]


def test_terminals_obey_nothing_that_a_text_says(recipe_file, tmp_path):
    turns = [
        {"role": "user", "content": "Hi \x1b[31m"},
        {"role": "assistant", "content": "[bold]Yes[/bold]\x07"},
    ]
    path = tmp_path / "odd.jsonl"
    path.write_text(json.dumps({"messages": turns}))
    output = call("prepare", recipe_file, f"data.train=[{{path: {path}}}]")[1]
    assert "\x1b[31m" not in output and "\x07" not in output
    assert "␛[31m" in output and "[bold]Yes[/bold]␇" in output
