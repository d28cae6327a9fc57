"""Reads a recipe from its YAML file, with the overrides of the command line.

The YAML is version 1.2: `1e-4` is a number and `no` a word. Errors name file and line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.constructor import SafeConstructor
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from draftsmith.speculators.errors import ConfigError
from draftsmith.speculators.hub import expanded
from draftsmith.train.recipe.recipe import ONE_VALUE, Recipe, family_of, recipe_class, yaml_line
from draftsmith.train.recipe.schema import explain
from draftsmith.train.recipe.sections import Gate

# What a recipe does not take from one of another family.
OF_ONE_FAMILY = {"drafter", "loss", "position_weights", "gates"}


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read, override and validate one recipe file. Raises ConfigError, whose text lists every
    mistake found.

    `overrides` are `section.key=value` strings; values are YAML, `null` included, and list items go
    by number (`data.train.0.limit=100`)."""
    path = Path(path)
    tree = read(path)
    parsed = [(override, *parse_override(override)) for override in overrides]
    for override, keys, value in parsed:
        _set(tree, _location(keys), value, override)
    tree = expanded(tree)
    model = recipe_class(family_of(tree))
    try:
        return model.model_validate(tree).resolved()
    except ValidationError as error:
        raise ConfigError(explain(error, model), where=f"{path}") from None


def _location(keys: Sequence[str]) -> list[str | int]:
    """The levels of an override's key; the name of a gate, dots and all, is one level."""
    if keys[0] == "gates" and len(keys) > 1:
        bound = [keys[-1]] if keys[-1] in Gate.model_fields else []
        return ["gates", ".".join(keys[1 : len(keys) - len(bound)]), *bound]
    return [int(key) if key.isdigit() else key for key in keys]


def _set(tree: Any, location: list[str | int], value: Any, override: str) -> None:
    """Puts `value` at `location`, making the mappings on the way."""
    *above, last = location
    try:
        for key in above:
            if isinstance(tree, dict) and tree.get(key) is None:
                tree[key] = {}
            elif location[0] == "loss" and isinstance(tree[key], int | float):
                tree[key] = {"weight": tree[key]}  # loss.jsd.beta=0.3 over the shorthand jsd: 1.0
            tree = tree[key]
        tree[last] = value
    except (TypeError, IndexError):
        raise ConfigError("the recipe has no such place", where=f"override {override}") from None


class _Constructor(SafeConstructor):
    """Builds plain data; a date is a string, as any other name."""


_Constructor.add_constructor("tag:yaml.org,2002:timestamp", SafeConstructor.construct_yaml_str)


def read(path: Path, extended_by: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The mapping in one YAML file, over that of the file that it `extends` (a path beside it),
    without OF_ONE_FAMILY if that is of another family. ConfigError names the file, and the line
    where there is one."""
    if path.resolve() in extended_by:
        raise ConfigError("extends: the file extends itself", where=f"{path}")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        advice = "give a recipe file, such as recipes/quickstart/eagle3.yaml"
        raise ConfigError(f"cannot be read: {reason}; {advice}", where=f"{path}") from None
    tree = _parse(text, f"{path}")
    if not isinstance(tree, dict):
        raise ConfigError("expected a mapping of sections at the top", where=f"{path}")
    if (base := tree.pop("extends", None)) is None:
        return tree
    below = read(path.parent / str(base), (*extended_by, path.resolve()))
    left = {"name"}
    if "family" in below and tree.get("family", below["family"]) != below["family"]:
        left |= OF_ONE_FAMILY
    return merged({key: value for key, value in below.items() if key not in left}, tree)


def merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """`below` with the keys of `above`: sections key by key, anything else as a whole."""

    def section(value: Any) -> bool:  # and no shares of temperatures
        return isinstance(value, dict) and all(isinstance(key, str) for key in value)

    return below | {
        key: merged(below[key], value)
        if section(value) and section(below.get(key)) and key not in ONE_VALUE
        else value
        for key, value in above.items()
    }


def parse_override(override: str) -> tuple[list[str], Any]:
    """`training.steps=200` -> (["training", "steps"], 200); the value is YAML, `=` alone null."""
    name, equals, value = override.partition("=")
    keys = name.strip().split(".")
    if not equals or not all(keys):
        raise ConfigError("expected section.key=value", where=f"override {override}")
    return keys, _parse(value, f"override {override}")


def override_text(key: str, value: Any) -> str:
    """The override that sets `key` to plain data; `parse_override` reads it back."""
    return f"{key}={yaml_line(value)}"


def _parse(text: str, where: str) -> Any:
    parser = YAML(typ="safe", pure=True)
    parser.Constructor = _Constructor
    try:
        return parser.load(text)
    except MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(f"line {line}: {error.problem}", where=where) from None
    except YAMLError as error:
        raise ConfigError(f"not valid YAML: {error}", where=where) from None
