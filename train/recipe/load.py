"""Reads a recipe from its YAML file, with the overrides of the command line.

The YAML is version 1.2: `1e-4` is a number and `no` a word. Duplicate keys are refused; errors name
file and line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.constructor import SafeConstructor
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from draftsmith.speculators.errors import ConfigError
from draftsmith.train.recipe.recipe import ONE_VALUE, Recipe, family_of, recipe_class
from draftsmith.train.recipe.schema import Location, Node, Schema, explain, schema_of


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read, override and validate one recipe file. Raises ConfigError, whose text lists every
    mistake found.

    `overrides` are `section.key=value` strings; values are YAML, `null` included, and list items go
    by number (`data.train.0.limit=100`)."""
    path = Path(path)
    tree = read(path)
    overridden: list[Location] = []
    parsed = [(override, *parse_override(override)) for override in overrides]
    families = [value for _, keys, value in parsed if keys == ["family"]]
    model = recipe_class(family_of({"family": families[-1]} if families else tree))
    for override, keys, value in parsed:
        overridden.append(_set(tree, _location(keys, schema_of(model)), value, override))
    try:
        return model.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(explain(error, str(path), overridden, model)) from None


def _location(keys: Sequence[str], schema: Schema) -> Location:
    """Joins the keys that are one key with dots in it: gates.t0.acceptance_length.min has three
    levels."""
    location: list[str | int] = []
    node: Node | None = schema.root
    while keys:
        values = schema.resolve(node or {}).get("additionalProperties")
        if isinstance(values, dict):  # a mapping of sections
            tail = (
                1
                if len(keys) > 1 and keys[-1] in schema.resolve(values).get("properties", ())
                else 0
            )
            return (*location, ".".join(keys[: len(keys) - tail]), *keys[len(keys) - tail :])
        location.append(int(keys[0]) if keys[0].isdigit() else keys[0])
        node, keys = schema.child(node or {}, keys[0]), keys[1:]
    return tuple(location)


def _set(tree: Any, location: Location, value: Any, override: str) -> Location:
    """Put `value` at `location`, making the mappings on the way; returns the location."""
    for depth, key in enumerate(location):
        at = ".".join(map(str, location[:depth])) or "the recipe"
        if isinstance(tree, list):
            if not (isinstance(key, int) and key < len(tree)):
                raise ConfigError(
                    f"{override}: {at} is a list of {len(tree)}; give an item's number, from 0",
                    where="command line",
                )
        elif not isinstance(tree, dict):
            raise ConfigError(
                f"{override}: {at} is {tree!r}, not a section; override {at} itself",
                where="command line",
            )
        if depth == len(location) - 1:
            tree[key] = value
        elif isinstance(tree, dict) and tree.get(key) is None:
            tree[key] = {}
        elif (
            isinstance(tree, dict) and isinstance(tree[key], int | float) and location[0] == "loss"
        ):
            tree[key] = {"weight": tree[key]}  # loss.jsd.beta=0.3 over the shorthand jsd: 1.0
        tree = tree[key]
    return location


class _Constructor(SafeConstructor):
    """Builds plain data; a date is a string, as any other name."""


_Constructor.add_constructor("tag:yaml.org,2002:timestamp", SafeConstructor.construct_yaml_str)


def read(path: Path, extended_by: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The mapping in one YAML file, over that of the file that it `extends` (a path beside it).
    ConfigError names the file, and the line where there is one."""
    if path.resolve() in extended_by:
        raise ConfigError("extends: the file extends itself", where=f"{path}")
    if path.is_dir():
        raise ConfigError(
            f"is a directory; give the recipe file itself, such as {path / 'eagle3.yaml'}",
            where=f"{path}",
        )
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(
            "no such recipe file; recipes/ holds the ones that come with Draftsmith",
            where=f"{path}",
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot be read as UTF-8 text: {error}", where=f"{path}") from None
    tree = _parse(text, str(path))
    if not isinstance(tree, dict):
        given = "nothing" if tree is None else f"a {type(tree).__name__}"
        raise ConfigError(
            f"expected a mapping of sections at the top, got {given}", where=f"{path}"
        )
    if (base := tree.pop("extends", None)) is None:
        return tree
    if not isinstance(base, str):
        raise ConfigError(
            f"extends: expected the path of a recipe file, got {base!r}", where=f"{path}"
        )
    below = read(path.parent / base, (*extended_by, path.resolve()))
    return merged({key: value for key, value in below.items() if key != "name"}, tree)


def merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """`below` with the keys of `above`: sections key by key, anything else as a whole."""

    def section(value: Any) -> bool:
        return isinstance(value, dict) and all(isinstance(key, str) for key in value)

    return below | {
        key: merged(below[key], value)
        if section(value) and section(below.get(key)) and key not in ONE_VALUE
        else value
        for key, value in above.items()
    }


def parse_override(override: str) -> tuple[list[str], Any]:
    """`training.steps=200` -> (["training", "steps"], 200); the value is YAML, nothing after `=` is
    null."""
    name, equals, value = override.partition("=")
    keys = name.strip().split(".")
    if not equals or not all(keys):
        raise ConfigError(f"expected section.key=value, got '{override}'", where="command line")
    return keys, _parse(value, f"command line: {override}")


def _parse(text: str, where: str) -> Any:
    parser = YAML(typ="safe", pure=True)
    parser.Constructor = _Constructor
    try:
        return parser.load(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f" line {mark.line + 1}, column {mark.column + 1}:" if mark else ""
        raise ConfigError(f"{where}:{line} {error.problem or error.context}") from None
    except YAMLError as error:
        raise ConfigError(f"not valid YAML: {error}", where=where) from None
