"""Fields of a class as options of a command."""

from __future__ import annotations

from typing import Annotated

import pytest
import typer
from pydantic import BaseModel, Field
from typer.testing import CliRunner

from draftsmith.inference.flags import CommaSeparated, JsonObject, json_option, register, validated
from draftsmith.speculators.errors import ConfigError
from tests.support.errors import raises_at


class Options(BaseModel):
    """Do something."""

    name: str = Field(description="what it is called")
    count: int = Field(0, description="how many", ge=0)
    wait_s: float = Field(1.5, description="seconds")
    fields: JsonObject = Field({}, description="more fields")
    secret: str = Field("", exclude=True)


def command(*words: str, others: bool = False):
    """What the command prints, and what it passes on."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    passed = []
    register(app, "do", Options, lambda *arguments: passed.append(arguments), others=others)
    return CliRunner().invoke(app, list(words), terminal_width=100), passed


def test_help_shows_what_a_field_takes_and_its_default():
    text = " ".join(command("--help")[0].output.split())
    assert "Do something." in text and "--name TEXT what it is called (required)" in text
    assert "--count NUMBER how many (0)" in text and "--wait NUMBER seconds (1.5)" in text
    assert "--fields JSON more fields -h" in text and "secret" not in text


def test_register_passes_the_options_that_were_typed_and_other_words():
    _, passed = command("--name", "a", "--wait=2", "b", "--else", others=True)
    assert passed == [({"name": "a", "wait_s": "2"}, ["b", "--else"])]


def test_register_takes_the_home_folder_as_recipes_do(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    _, passed = command("--name=~/a", "~/b", "c~/", others=True)
    assert passed == [({"name": "/home/someone/a"}, ["/home/someone/b", "c~/"])]


@pytest.mark.parametrize(
    "values, option",
    [
        ({}, " --name"),
        ({"name": "a", "count": "-1"}, " --count"),
        ({"name": "a", "wait_s": "x"}, " --wait"),
        ({"name": "a", "fields": "5"}, " --fields"),
    ],
)
def test_validated_the_option_of_a_wrong_value_is_named(values, option):
    with raises_at(ConfigError, f"do{option}"):
        validated(Options, "do", values)


def test_validated_reads_json_and_lists_at_commas():
    class Lists(Options):
        sizes: Annotated[tuple[int, ...], CommaSeparated] = ()

    values = {"name": "a", "fields": '{"b": [1]}', "sizes": ["1,2", "4"]}
    options = validated(Lists, "do", values)
    assert options.fields == {"b": [1]} and options.sizes == (1, 2, 4)


def test_json_option_takes_an_object_or_nothing():
    assert json_option("--x", "") is None and json_option("--x", "null") is None
    assert json_option("--x", '{"a": 1}') == {"a": 1}
    for text in ("5", "[]", "{"):
        with raises_at(ConfigError, "--x"):
            json_option("--x", text)
