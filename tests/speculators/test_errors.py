"""Errors say where, and keep it on the way between processes."""

from __future__ import annotations

import pickle

import pytest

from draftsmith.speculators.errors import ConfigError
from draftsmith.train.data.bad_rows import BadRow


@pytest.mark.parametrize(
    "error",
    [ConfigError("5 is too many", where="drafter.num_layers"), BadRow("chats.jsonl:3", "empty")],
)
def test_error_with_a_place_begins_with_it(error):
    copy = pickle.loads(pickle.dumps(error))
    assert str(copy) == str(error) and copy.where == error.where
    assert str(error).startswith(f"{error.where}: ")


def test_error_without_a_place_is_its_message():
    assert str(ConfigError("no recipe")) == "no recipe" and ConfigError("x").where is None
