"""The keys of a pydantic model, read off its JSON schema: for the manual, and for errors that name
file and key."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

Location = tuple[str | int, ...]
Node = dict[str, Any]  # a JSON schema

_NAMES = {
    "integer": "an integer",
    "number": "a number",
    "string": "a string",
    "boolean": "true or false",
    "object": "a mapping",
    "null": "null",
}
_BOUNDS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}


class SchemaRow(NamedTuple):
    """One key of the recipe, as `draftsmith schema` prints it."""

    name: str
    type: str
    default: str
    description: str


class Schema:
    """The JSON schema of a model. A node is the schema of one key; `resolve` gives what a `$ref`
    stands for."""

    def __init__(self, model: type[BaseModel]) -> None:
        self.root: Node = model.model_json_schema()

    def resolve(self, node: Node) -> Node:
        """The node without `$ref` and without `| null`."""
        arms = [arm for arm in node.get("anyOf", ()) if arm.get("type") != "null"]
        node = arms[0] if len(arms) == 1 else node
        return self.root["$defs"][node["$ref"].rsplit("/", 1)[-1]] if "$ref" in node else node

    def child(self, node: Node, key: str | int) -> Node | None:
        """The node of a key, a list's items or a mapping's values."""
        node = self.resolve(node)
        if "properties" in node:
            return node["properties"].get(str(key))
        below = node.get("items") or node.get("additionalProperties")
        return below if isinstance(below, dict) else node if "anyOf" in node else None

    def at(self, location: Location) -> Node | None:
        """The node that a validation error points at."""
        node: Node | None = self.root
        for key in location:
            node = None if node is None else self.child(node, key)
        return node

    def keys(self, location: Location) -> list[str]:
        """The keys that are valid there."""
        node = self.at(location)
        return [] if node is None else list(self.resolve(node).get("properties", ()))

    def rows(self) -> list[SchemaRow]:
        """Every key in the order of the model. The keys of a section that occurs twice are given
        once."""
        return list(self._rows(self.root, "", {}))

    def _rows(self, section: Node, prefix: str, seen: dict[int, str]) -> Iterator[SchemaRow]:
        for name, node in section["properties"].items():
            inner, below = self.resolve(node), prefix + name
            if inner.get("type") == "array":
                inner, below = self.resolve(inner["items"]), below + "[]"
            elif isinstance(inner.get("additionalProperties"), dict):
                inner, below = self.resolve(inner["additionalProperties"]), below + ".<name>"
            meaning = node.get("description", "")
            if id(inner) in seen:
                meaning += f" (keys: see {seen[id(inner)]})"
            default = "required" if name in section.get("required", ()) else _default(node)
            yield SchemaRow(prefix + name, describe(node), default, meaning)
            if "properties" in inner and id(inner) not in seen:
                seen[id(inner)] = below
                yield from self._rows(inner, below + ".", seen)


schema_of = cache(Schema)


def _default(node: Node) -> str:
    value = node["default"]
    if "$ref" in node:
        return ""  # a section, whose keys follow, each with its own default
    return value if isinstance(value, str) else json.dumps(value)


def describe(node: Node) -> str:
    """The values that a key takes, in words: `an integer >= 1 or null`."""
    if "anyOf" in node:
        return " or ".join(map(describe, node["anyOf"]))
    if "enum" in node or "const" in node:
        return "one of " + ", ".join(map(str, node.get("enum", [node.get("const")])))
    if "$ref" in node:
        return "a mapping"
    if node.get("type") == "array":
        least = {0: "a list", 1: "a non-empty list", 2: "a list of two"}[node.get("minItems", 0)]
        return f"{least}, each {describe(node['items'])}"
    word = _NAMES.get(node.get("type", ""), "a value")
    if "pattern" in node:
        return f"{word} matching {node['pattern']}"
    bounds = [f"{sign} {node[bound]:g}" for bound, sign in _BOUNDS.items() if bound in node]
    return " ".join([word, " and ".join(bounds)]) if bounds else word


# ------------------------------------------------------------------ errors


def explain(
    error: ValidationError, path: str, overridden: Sequence[Location], model: type[BaseModel]
) -> str:
    """All mistakes, a line per source: `recipes/x.yaml: drafter.num_layers: expected ..., got ...;
    ...`."""
    texts: dict[str, list[str]] = {}
    wide = ("value_error", "extra_forbidden")  # blame a whole section, whichever key in it was set
    for item in error.errors(include_url=False):
        dotted, message = ".".join(map(str, item["loc"])), _message(item, schema_of(model))
        text = f"{dotted}: {message}" if dotted else message
        at, _, _ = text.partition(
            ":"
        )  # checks across sections have no location, but name the key first
        caused = any(_concerns(at, ".".join(map(str, o)), item["type"] in wide) for o in overridden)
        texts.setdefault("command line" if caused else path, []).append(text)
    return "\n".join(f"{source}: {'; '.join(messages)}" for source, messages in texts.items())


def _concerns(at: str, override: str, within: bool) -> bool:
    """True if the override set the wrong key, a section around it, or (`within`) a key inside
    it."""
    return f"{at}.".startswith(f"{override}.") or (within and f"{override}.".startswith(f"{at}."))


def _message(item: ErrorDetails, schema: Schema) -> str:
    kind, location = item["type"], item["loc"]
    if kind == "value_error":
        return str(item["ctx"]["error"])
    if kind == "extra_forbidden":
        return f"unknown key{_suggestion(location, schema)}"
    node = schema.at(location)
    if kind == "missing":
        return f"required, but missing: {node['description']}" if node else "required, but missing"
    return f"{f'expected {describe(node)}' if node else item['msg']}, got {_short(item['input'])}"


def _suggestion(location: Location, schema: Schema) -> str:
    """The nearest valid key here, else the same key in another section, else all keys valid
    here."""
    key, valid = str(location[-1]), schema.keys(location[:-1])
    if near := difflib.get_close_matches(key, valid, n=1, cutoff=0.6):
        return f"; did you mean '{near[0]}'?"
    if elsewhere := [row.name for row in schema.rows() if row.name.rsplit(".", 1)[-1] == key]:
        return f"; did you mean '{elsewhere[0]}'?"
    return f"; valid keys here: {', '.join(valid)}"


def _short(value: Any) -> str:
    text = {"None": "null", "True": "true", "False": "false"}.get(repr(value), repr(value))
    return text if len(text) <= 80 else text[:77] + "..."
