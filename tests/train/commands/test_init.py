"""`draftsmith init`: the recipe that it writes, and what of the model and the data it says."""

from __future__ import annotations

import gzip
import json
import shutil

import pytest
from transformers import AutoTokenizer

from draftsmith.speculators.registry import FAMILIES
from draftsmith.train.data.packing import knows_thinking
from draftsmith.train.recipe.load import load_recipe
from tests.quickstart_data import source
from tests.support.targets import TOKENIZER
from tests.train.test_cli import call, refused

THINKING = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
    "{% if enable_thinking is not defined or enable_thinking %}<think>{% endif %}"
)


@pytest.fixture
def chats(tmp_path):
    with gzip.open(source("train", 1)["path"], "rt") as file:
        rows = file.read().splitlines()[:100]
    (tmp_path / "chats.jsonl").write_text("\n".join(rows) + "\n")
    return tmp_path / "chats.jsonl"


def options(target, chats, out, *more):
    return ("init", "--model", str(target), "--data", str(chats), "--out", str(out), *more)


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_init_of_model_and_data_writes_a_recipe_that_plans(family, chats, tmp_path):
    out = tmp_path / "my.yaml"
    printed = call(*options(TOKENIZER, chats, out, "--family", family))[1]
    assert "100 conversations" in printed
    recipe = load_recipe(out)
    assert recipe.family == family
    assert [s.split for s in (*recipe.data.train, *recipe.data.validation)] == [
        "train[5:]",
        "train[:5]",
    ]
    prompts = int(out.read_text().partition("prompts have up to ")[2].split()[0])
    assert recipe.regenerate.max_new_tokens == 256
    assert prompts + 256 <= recipe.data.max_length < prompts + 256 + 128
    assert not recipe.regenerate.endpoints
    if family == "eagle3":
        assert "tap_layers: [2, 8, 13]" in out.read_text()
    assert "drafter" in call("train", str(out), "--dry-run")[1]


@pytest.mark.slow
@pytest.mark.parametrize("flag, least", [("--thinking", 4096 // 2), ("--no-thinking", 256)])
def test_init_of_a_thinking_model_sets_the_mode_and_the_length(flag, least, chats, tmp_path):
    target = shutil.copytree(TOKENIZER, tmp_path / "target")
    (target / "chat_template.jinja").write_text(THINKING)
    out = tmp_path / "my.yaml"
    printed = call(*options(target, chats, out, flag))[1]
    recipe = load_recipe(out)
    assert recipe.data.chat_template_kwargs == {"enable_thinking": flag == "--thinking"}
    assert f"thinking mode: {'on' if flag == '--thinking' else 'off'}" in printed
    longest = json.loads((target / "config.json").read_text())["max_position_embeddings"]
    assert recipe.data.max_length <= longest
    assert recipe.regenerate.max_new_tokens >= min(least, longest // 2)


def test_init_where_writing_takes_long_names_servers(chats, tmp_path, monkeypatch):
    monkeypatch.setattr("draftsmith.train.commands.init.HOUR", 0.0)
    out = tmp_path / "my.yaml"
    call(*options(TOKENIZER, chats, out))
    assert [e.url for e in load_recipe(out).regenerate.endpoints] == ["http://localhost:8000/v1"]


def test_init_of_folders_with_signs_of_yaml_names_them_in_the_recipe(chats, tmp_path):
    out = tmp_path / "my.yaml"
    data = chats.rename(tmp_path / "\U0001f600 #1.jsonl")
    call(*options(TOKENIZER, data, out))
    assert [source.path for source in load_recipe(out).data.train] == [str(data)]


def test_init_keeps_a_recipe_that_exists(chats, tmp_path):
    out = tmp_path / "my.yaml"
    out.write_text("mine\n")
    assert "--out" in refused(*options(TOKENIZER, chats, out))
    assert out.read_text() == "mine\n"


@pytest.mark.slow
def test_a_recipe_that_says_nothing_of_thinking_is_warned(chats, tmp_path, caplog):
    target = shutil.copytree(TOKENIZER, tmp_path / "target")
    (target / "chat_template.jinja").write_text(THINKING)
    out = tmp_path / "my.yaml"
    call(*options(target, chats, out, "--no-thinking"))
    call("train", str(out), "--dry-run")
    assert "enable_thinking" not in caplog.text
    call("train", str(out), "--dry-run", "data.chat_template_kwargs={}")
    assert "enable_thinking" in caplog.text


def test_thinking_of_a_template_that_fails_is_left_to_the_rows():
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    assert knows_thinking(tokenizer, THINKING)
    assert not knows_thinking(tokenizer, "{{ raise_exception('a system turn is needed') }}")
