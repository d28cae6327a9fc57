"""Every mistake in a recipe as text that names the file, the key, what was expected and what was found."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from train.recipe.schema import Location, describe, field_at, model_at, rows


def explain(error: ValidationError, path: str, overridden: Sequence[Location], model: type[BaseModel]) -> str:
    """All mistakes, a line per source: `recipes/x.yaml: drafter.num_layers: expected ..., got ...; ...`."""
    texts: dict[str, list[str]] = {}
    wide = ("value_error", "extra_forbidden")  # blame a whole section, whichever key in it was set
    for item in error.errors(include_url=False):
        dotted = ".".join(str(key) for key in item["loc"])
        text = f"{dotted}: {_message(item, model)}" if dotted else _message(item, model)
        at, _, _ = text.partition(":")  # checks across sections have no location, but name the key first
        caused = any(_concerns(at, ".".join(map(str, o)), item["type"] in wide) for o in overridden)
        texts.setdefault("command line" if caused else path, []).append(text)
    return "\n".join(f"{source}: {'; '.join(messages)}" for source, messages in texts.items())


def _concerns(at: str, override: str, within: bool) -> bool:
    """Whether the override set the wrong key, or something around it, or (`within`) inside it."""
    return f"{at}.".startswith(f"{override}.") or (within and f"{override}.".startswith(f"{at}."))


def _message(item: ErrorDetails, model: type[BaseModel]) -> str:
    kind, location, value = item["type"], item["loc"], item["input"]
    if kind == "value_error":
        return str(item["ctx"]["error"])
    if kind == "extra_forbidden":
        return f"unknown key{_suggestion(location, model)}"
    info = field_at(location, model)
    if kind == "missing":
        return f"required, but missing: {info.description}" if info else "required, but missing"
    return f"expected {describe(info) if info else item['msg']}, got {_short(value)}"


def _suggestion(location: Location, recipe: type[BaseModel]) -> str:
    """The nearest valid key here, else the same key in another section, else all keys valid here."""
    model = model_at(location[:-1], recipe)
    key, valid = str(location[-1]), list(model.model_fields) if model else []
    if near := difflib.get_close_matches(key, valid, n=1, cutoff=0.6):
        return f"; did you mean '{near[0]}'?"
    names = [row.name for row in rows(recipe, "", {})]
    if elsewhere := [name for name in names if name.rsplit(".", 1)[-1] == key]:
        return f"; did you mean '{elsewhere[0]}'?"
    return f"; valid keys here: {', '.join(valid)}"


def _short(value: Any) -> str:
    text = {"None": "null", "True": "true", "False": "false"}.get(repr(value), repr(value))
    return text if len(text) <= 80 else text[:77] + "..."
