"""`draftsmith prepare`: what it counts is what a run trains on; a terminal obeys nothing of it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from draftsmith.train.data.loss_mask import ConversationTokenizer
from draftsmith.train.data.packing import prepare_rows
from draftsmith.train.data.prepare import bad_rows, training_examples
from draftsmith.train.recipe.load import load_recipe
from draftsmith.train.recipe.recipe import yaml_text
from tests.support.cli import call, refused
from tests.support.damaged_conversations import BAD, WHOLE
from tests.support.quickstart_data import source as quickstart
from tests.support.targets import TOKENIZER


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
    assert code == 0 and "1 prompt," in output and "Say hello." in output
    assert "no assistant turn" in refused("prepare", recipe_file, override)
    assert "6 examples" in call("prepare", recipe_file, "--validation")[1]


def test_prepare_of_responses_to_be_written_says_what_the_run_supervises(recipe_file, tmp_path):
    """Those of the data are not trained on, so none of them is shown as supervised."""
    turns = [
        {"role": "user", "content": "Say a word."},
        {"role": "assistant", "content": "Platypus."},
        {"role": "user", "content": "Say another."},
        {"role": "assistant", "content": "Aardvark."},
    ]
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"messages": turns}) + "\n")
    options = (recipe_file, f"data.train=[{{path: {path}}}]", "regenerate.enabled=true")
    output = call("prepare", *options)[1]
    assert "Platypus" in output and "Aardvark" not in output and "(green)" not in output
    share = re.search(r"the target's own last response alone, about (\d+)%", output)
    every = re.search(
        r"the target's own responses alone, about (\d+)%",
        call("prepare", *options, "regenerate.turns=all")[1],
    )
    assert 0 < int(share[1]) < int(every[1]) < 100


def test_prepare_in_a_log_keeps_a_long_line_whole(recipe_file, tmp_path):
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "user", "content": "word " * 400}]}) + "\n")
    options = (f"data.train=[{{path: {path}}}]", "regenerate.enabled=true", "data.max_length=64")
    lines = call("prepare", recipe_file, *options)[1].splitlines()
    (counts,) = [line for line in lines if line.startswith("1 example:")]
    assert counts.endswith("(an earlier turn is answered, if there is one)")


@pytest.mark.parametrize("regenerate", ["true", "false"])
def test_prepare_shows_the_end_of_a_sample_and_then_its_counts(recipe_file, tmp_path, regenerate):
    """The whole on request."""
    turns = [
        {"role": "user", "content": "First. " + "word " * 400 + "Middle. " + "word " * 400},
        {"role": "assistant", "content": "So be it. " * 100},
    ]
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"messages": turns * 6}) + "\n")
    options = (f"data.train=[{{path: {path}}}]", f"regenerate.enabled={regenerate}")
    long = "data.max_length=20000"
    output = call("prepare", recipe_file, *options, long)[1]
    assert len(output) < 4000 and "Middle" not in output
    assert output.index("word") < output.index("1 example:") < output.index("tokens: min")
    assert "Middle" in call("prepare", recipe_file, *options, long, "--full")[1]


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
