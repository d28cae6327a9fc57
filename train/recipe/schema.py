"""The keys of a pydantic model, by its JSON schema: for the manual and for errors."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

from pydantic import BaseModel, ValidationError

Node = dict[str, Any]  # a JSON schema

_BOUNDS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}


class SchemaRow(NamedTuple):
    """One key of the recipe, as `draftsmith schema` prints it."""

    name: str
    type: str
    default: str
    description: str


@cache
def schema_rows(model: type[BaseModel]) -> list[SchemaRow]:
    """Every key in the order of the model; those of a section that occurs twice once."""
    root = model.model_json_schema()
    return list(_rows(root, root, "", {}))


def _rows(root: Node, section: Node, prefix: str, seen: dict[str, str]) -> Iterator[SchemaRow]:
    """`seen`: where a section has been spelled out, by its reference."""
    for name, node in section["properties"].items():
        inner = _section(node)
        below = prefix + name
        if inner.get("type") == "array":
            inner = _section(inner["items"])
            below += "[]"
        elif isinstance(inner.get("additionalProperties"), dict):
            inner = _section(inner["additionalProperties"])
            below += ".<name>"
        meaning = " ".join(node.get("description", "").split())
        reference = inner.get("$ref")
        if reference in seen:
            meaning += f" (keys: see {seen[reference]})"
        default = "required" if name in section.get("required", ()) else _default(node)
        yield SchemaRow(prefix + name, describe(node), default, meaning)
        if reference is not None and reference not in seen:
            seen[reference] = below
            definition = root["$defs"][reference.rsplit("/", 1)[-1]]
            yield from _rows(root, definition, below + ".", seen)


def _section(node: Node) -> Node:
    """The node without `| null`."""
    arms = [arm for arm in node.get("anyOf", ()) if arm.get("type") != "null"]
    return arms[0] if len(arms) == 1 else node


def _default(node: Node) -> str:
    value = node["default"]
    if "$ref" in node:
        return ""  # a section, whose keys follow, each with its own default
    return value if isinstance(value, str) else json.dumps(value)


def describe(node: Node) -> str:
    """The values that a key takes, in JSON's words: `integer >= 1 or null`."""
    if "anyOf" in node:
        return " or ".join(map(describe, node["anyOf"]))
    if "enum" in node or "const" in node:
        return "one of " + ", ".join(map(str, node.get("enum", [node.get("const")])))
    if "$ref" in node:
        return "object"
    if node.get("type") == "array":
        return f"{'non-empty ' * ('minItems' in node)}list of {describe(node['items'])}"
    word = node.get("type", "anything")
    if "pattern" in node:
        return f"{word} matching {node['pattern']}"
    bounds = [f"{sign} {node[bound]:g}" for bound, sign in _BOUNDS.items() if bound in node]
    return " ".join([word, " and ".join(bounds)]) if bounds else word


def explain(error: ValidationError, model: type[BaseModel]) -> str:
    """All mistakes: `drafter.num_layers: Input should be a valid integer, got 'two'; ...`."""
    mistakes = []
    for item in error.errors(include_url=False):
        key = ".".join(map(str, item["loc"]))
        kind = item["type"]
        message = item["msg"]
        if kind == "value_error":  # checks across sections have no location, but name the key first
            message = str(item["ctx"]["error"])
        elif kind == "extra_forbidden":
            message = f"unknown key{_suggestion(str(item['loc'][-1]), model)}"
        elif kind != "missing":
            message += f", got {str(item['input'])[:80]!r}"
        mistakes.append(f"{key}: {message}" if key else message)
    return "; ".join(mistakes)


def _suggestion(key: str, model: type[BaseModel]) -> str:
    """The key of the most similar name, wherever it is."""
    names = {row.name.rsplit(".", 1)[-1]: row.name for row in reversed(schema_rows(model))}
    near = difflib.get_close_matches(key, names, n=1)
    return f"; did you mean '{names[near[0]]}'?" if near else ""
