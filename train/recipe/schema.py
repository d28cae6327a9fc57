"""The keys of a section, read off its pydantic model: for the manual, and for errors that name file and key.

Works on any model.
"""

from __future__ import annotations

import difflib
import json
import types
import typing
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

Location = tuple[str | int, ...]


class SchemaRow(NamedTuple):
    """One key of the recipe, as `draftsmith schema` prints it."""

    name: str
    type: str
    default: str
    description: str


def rows(model: type[BaseModel], prefix: str, seen: dict[type[BaseModel], str]) -> Iterator[SchemaRow]:
    for name, info in model.model_fields.items():
        node, dotted = plain(info.annotation), prefix + name
        if (inner := mapping_value(node)) is not None:
            below = dotted + ".<name>"
        elif typing.get_origin(node) is list and is_model(plain(typing.get_args(node)[0])):
            inner, below = plain(typing.get_args(node)[0]), dotted + "[]"
        else:
            inner, below = (node if is_model(node) else None), dotted
        meaning = f"{info.description} (keys: see {seen[inner]})" if inner in seen else info.description
        yield SchemaRow(dotted, describe(info), _default(info), meaning or "")
        if inner is not None and inner not in seen:
            seen[inner] = below
            yield from rows(inner, below + ".", seen)


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return "required"
    value = info.get_default(call_default_factory=True)
    if isinstance(value, BaseModel):
        return ""  # its keys follow, each with its own default
    if isinstance(value, list | dict):
        value = json.loads(json.dumps(value, default=lambda item: item.model_dump()))
    return json.dumps(value) if not isinstance(value, str) else value


_NAMES = {int: "an integer", float: "a number", str: "a string", bool: "true or false", dict: "a mapping"}
_BOUNDS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}


def describe(info: FieldInfo) -> str:
    """What a field takes, in words: `an integer >= 1 or null`."""
    arms = typing.get_args(info.annotation) if _is_union(info.annotation) else (info.annotation,)
    words = [_describe_arm(arm, info.metadata) for arm in arms if arm is not type(None)]
    return " or ".join(words + (["null"] if type(None) in arms else []))


def _describe_arm(arm: Any, metadata: Sequence[Any]) -> str:
    if typing.get_origin(arm) is typing.Annotated:
        inner = FieldInfo.from_annotation(arm)
        return _describe_arm(inner.annotation, [*inner.metadata, *metadata])
    if typing.get_origin(arm) is Literal:
        return "one of " + ", ".join(map(str, typing.get_args(arm)))
    if typing.get_origin(arm) is list:
        item = typing.get_args(arm)[0]
        least = max((getattr(m, "min_length", None) or 0 for m in metadata), default=0)
        prefix = {0: "a list", 1: "a non-empty list", 2: "a list of two"}[least]
        return f"{prefix}, each {'a mapping' if is_model(item) else describe(FieldInfo.from_annotation(item))}"
    if is_model(arm) or typing.get_origin(arm) is dict:
        return "a mapping"
    word = _NAMES.get(arm, "a value")
    if arm is str:
        pattern = next((m.pattern for m in metadata if getattr(m, "pattern", None)), None)
        return f"a string matching {pattern}" if pattern else word
    bounds = [
        f"{sign} {getattr(m, name):g}"
        for m in metadata
        for name, sign in _BOUNDS.items()
        if getattr(m, name, None) is not None
    ]
    return " ".join([word, " and ".join(bounds)]) if bounds else word


def is_model(node: Any) -> bool:
    return isinstance(node, type) and issubclass(node, BaseModel)


def _is_union(node: Any) -> bool:
    return typing.get_origin(node) in (typing.Union, types.UnionType)


def plain(annotation: Any) -> Any:
    """An annotation without `| None` and Annotated."""
    if _is_union(annotation):
        arms = [arm for arm in typing.get_args(annotation) if arm is not type(None)]
        annotation = arms[0] if len(arms) == 1 else annotation
    if typing.get_origin(annotation) is typing.Annotated:
        return typing.get_args(annotation)[0]
    return annotation


def mapping_value(node: Any) -> type[BaseModel] | None:
    """The section type of a mapping's values (`loss`, `gates`), if `node` is such a mapping."""
    if typing.get_origin(node) is dict and is_model(typing.get_args(node)[1]):
        return typing.get_args(node)[1]
    return None


def field_at(location: Location, model: type[BaseModel]) -> FieldInfo | Any:
    """The field, or the type of a list item or mapping value, that a validation error points at."""
    found: Any = None
    node: Any = model
    for key in location:
        if is_model(node):
            found = node.model_fields.get(str(key))
            node = plain(found.annotation) if found else None
        else:
            args = typing.get_args(node)
            found = FieldInfo.from_annotation(args[-1]) if args else None
            node = plain(args[-1]) if args else None
    return found


def model_at(location: Location, model: type[BaseModel]) -> type[BaseModel] | None:
    if not location:
        return model
    info = field_at(location, model)
    node = plain(info.annotation) if info else None
    return node if is_model(node) else None


# ------------------------------------------------------------------ errors


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
