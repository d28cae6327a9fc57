"""A recipe read from its file, with overrides of the command line put into it."""

from __future__ import annotations

import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from speculators.errors import ConfigError
from train.recipe import yaml_file as recipe_yaml
from train.recipe.errors import explain
from train.recipe.recipe import Recipe, family_of, recipe_class
from train.recipe.schema import Location, is_model, mapping_value, plain


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read, override and validate one recipe file. Raises ConfigError, whose text lists every mistake found.

    `overrides` are `section.key=value` strings; values are YAML, `null` included, and list items go by number
    (`data.train.0.limit=100`).
    """
    path = Path(path)
    tree = recipe_yaml.read(path)
    overridden: list[Location] = []
    parsed = [(override, *recipe_yaml.parse_override(override)) for override in overrides]
    families = [value for _, keys, value in parsed if tuple(keys) == ("family",)]
    model = recipe_class(family_of({"family": families[-1]} if families else tree))
    for override, keys, value in parsed:
        overridden.append(_set(tree, _schema_path(tuple(keys), model), value, override))
    try:
        return model.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(explain(error, str(path), overridden, model)) from None


def _schema_path(keys: tuple[str, ...], model: type[Recipe]) -> Location:
    """Join the keys that are one key with dots in it: gates.t0.acceptance_length.min has three levels."""
    location: list[str | int] = []
    node: Any = model
    while keys:
        if (value_model := mapping_value(node)) is not None:
            tail = 1 if len(keys) > 1 and keys[-1] in value_model.model_fields else 0
            return (*location, ".".join(keys[: len(keys) - tail]), *keys[len(keys) - tail :])
        head, keys = keys[0], keys[1:]
        location.append(int(head) if head.isdigit() else head)
        if is_model(node):
            info = node.model_fields.get(head)
            node = plain(info.annotation) if info else None
        else:
            node = plain(typing.get_args(node)[0]) if typing.get_origin(node) is list else None
    return tuple(location)


def _set(tree: Any, location: Location, value: Any, override: str) -> Location:
    """Put `value` at `location`, making the mappings on the way; returns the location."""
    for depth, key in enumerate(location):
        at = ".".join(map(str, location[:depth])) or "the recipe"
        if isinstance(tree, list):
            if not (isinstance(key, int) and key < len(tree)):
                raise ConfigError(
                    f"command line: {override}: {at} is a list of {len(tree)}; give an item's number, from 0"
                )
        elif not isinstance(tree, dict):
            raise ConfigError(f"command line: {override}: {at} is {tree!r}, not a section; override {at} itself")
        if depth == len(location) - 1:
            tree[key] = value
        elif isinstance(tree, dict) and tree.get(key) is None:
            tree[key] = {}
        elif isinstance(tree, dict) and isinstance(tree[key], int | float) and location[0] == "loss":
            tree[key] = {"weight": tree[key]}  # loss.jsd.beta=0.3 over the shorthand jsd: 1.0
        tree = tree[key]
    return location
