"""What keys a section has, read off its pydantic model: for the manual, and for errors that name a key.

Works on any model; knows no recipe.
"""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel
from pydantic.fields import FieldInfo

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
