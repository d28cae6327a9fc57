"""A run whose chat template prints the day prints one day, whichever day goes on with it."""

from __future__ import annotations

import json
from datetime import datetime

import pytest
from accelerate import Accelerator
from transformers import AutoTokenizer

from draftsmith.inference.progress import Stages
from draftsmith.speculators.errors import DataError
from draftsmith.train.data.examples import parse_row
from draftsmith.train.data.loss_mask import ConversationTokenizer
from draftsmith.train.data.prepare import run_tokenizer
from draftsmith.train.data.template_date import CLOCK, FILE, dated, run_date
from draftsmith.train.pipeline.data_stage import DataStage
from draftsmith.train.recipe.load import load_recipe
from draftsmith.train.recipe.recipe import yaml_text
from tests.support.cli import call
from tests.support.errors import raises_at
from tests.support.targets import TOKENIZER, save_target

DAY = datetime(2001, 2, 3, 4, 5, 6)
PLAIN = (TOKENIZER / "chat_template.jinja").read_text()
# As Llama 3.2 and gpt-oss ask: for a variable, and in a macro.
DATED = {
    "variable": "{% if date_string is not defined %}"
    "{% set date_string = strftime_now('%d %b %Y') %}{% endif %}{{ date_string }}" + PLAIN,
    "macro": "{% macro system() %}{{ strftime_now('%d %b %Y') }}{% endmacro %}{{ system() }}"
    + PLAIN,
}
ROW = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]}


@pytest.fixture
def recipe(tmp_path):
    """A function of a chat template: a recipe of a target that has it."""
    target = save_target(tmp_path / "target")
    (tmp_path / "chats.jsonl").write_text(json.dumps(ROW) + "\n")
    tree = {
        "name": "dated",
        "output_dir": str(tmp_path / "run"),
        "target": {"model": str(target)},
        "data": {"train": [{"path": str(tmp_path / "chats.jsonl")}], "max_length": 128},
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml_text(tree))

    def make(template: str):
        (target / "chat_template.jinja").write_text(template)
        return path

    return make


@pytest.mark.parametrize("template", DATED.values(), ids=DATED)
def test_conversation_tokenizer_with_a_date_prints_it(template):
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    converter = ConversationTokenizer(tokenizer, chat_template=template, date=DAY)
    example = parse_row(ROW, origin="x")
    for ids in (converter.prompt_ids(example), converter.rows(example)[0].input_ids):
        assert tokenizer.decode(ids).startswith("03 Feb 2001")
    assert converter.template_facts()["template_date"] == DAY.isoformat()


def test_dated_template_is_otherwise_as_it_was():
    """Every code of strftime, beside a written %, and the white space that it begins with."""
    codes = "%d %-d %B %Y|%%d %H:%M:%S %j %A"
    template = "\n  {% if true %}\n" + f"  {{{{ {CLOCK}('{codes}') }}}}" + "\n{% endif %} end"
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    turns = [{"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(turns, chat_template=dated(template, DAY), tokenize=False)
    now = template.replace(f"{{{{ {CLOCK}('{codes}') }}}}", DAY.strftime(codes))
    expected = tokenizer.apply_chat_template(turns, chat_template=now, tokenize=False)
    assert text == expected


def test_run_date_is_that_of_the_first_start(tmp_path):
    assert run_date(tmp_path).date() == datetime.now().date()
    assert not (tmp_path / FILE).exists()
    first = run_date(tmp_path / "run", keep=True)
    assert run_date(tmp_path / "run") == first
    (tmp_path / FILE).write_text(json.dumps({"template_date": DAY.isoformat()}))
    assert run_date(tmp_path, keep=True) == DAY
    for damaged in ("", "[]", '{"template_date": "today"}'):
        (tmp_path / FILE).write_text(damaged)
        with raises_at(DataError, tmp_path / FILE):
            run_date(tmp_path)


@pytest.mark.slow
def test_every_command_of_a_run_prints_the_day_of_its_first_start(recipe, tmp_path):
    path, run = recipe(DATED["variable"]), tmp_path / "run"
    assert call("prepare", path)[0] == 0
    kept = run_date(run)
    assert (run / FILE).exists()
    (run / FILE).write_text(json.dumps({"template_date": DAY.isoformat()}))  # as on a later day
    assert kept != DAY and "03 Feb 2001" in call("prepare", path)[1]
    loaded = load_recipe(path)
    tokenizer = loaded.target.load_tokenizer()
    stage = DataStage(loaded, None, tokenizer, Accelerator(cpu=True), Stages(enabled=False))
    assert stage.tokenizer.date == run_tokenizer(loaded, tokenizer).date == DAY


def test_a_template_without_a_date_leaves_none_in_the_run(recipe, tmp_path):
    path = recipe(PLAIN)
    assert call("prepare", path)[0] == 0
    assert not (tmp_path / "run" / FILE).exists()
    loaded = load_recipe(path)
    assert (
        "template_date"
        not in run_tokenizer(loaded, loaded.target.load_tokenizer()).template_facts()
    )
