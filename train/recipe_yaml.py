"""YAML as recipes mean it: duplicate keys refused, errors with file and line, `1e-4` a number, `no` a word.

Must not know: what the keys of a recipe are.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, ClassVar

import yaml

from speculators.errors import ConfigError


class _Loader(yaml.SafeLoader):
    """SafeLoader with YAML 1.2's booleans and floats (1.1 reads `no` as false and `1e-4` as a string)."""

    yaml_implicit_resolvers: ClassVar = {
        first: [
            (tag, regex)
            for tag, regex in resolvers
            if tag not in ("tag:yaml.org,2002:bool", "tag:yaml.org,2002:float", "tag:yaml.org,2002:timestamp")
        ]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[Any, int] = {}
        for key_node, _ in node.value:
            key, line = self.construct_object(key_node, deep=True), key_node.start_mark.line + 1
            if isinstance(key, list | dict):
                raise yaml.constructor.ConstructorError(
                    None, None, "a mapping or list cannot be a key", key_node.start_mark
                )
            if key in seen and key != "<<":
                raise yaml.constructor.ConstructorError(
                    None,
                    None,
                    f"duplicate key '{key}' (first on line {seen[key]}); keep one of them",
                    key_node.start_mark,
                )
            seen[key] = line
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), "tTfF")
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$|^[-+]?\.(?:inf|Inf|INF)$|^\.(?:nan|NaN)$"),
    "-+0123456789.",
)


def read(path: Path) -> dict[str, Any]:
    """The mapping in one YAML file. Raises ConfigError naming the file, and the line where there is one."""
    if path.is_dir():
        raise ConfigError(f"{path}: is a directory; give the recipe file itself, such as {path / 'eagle3.yaml'}")
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such recipe file; recipes/ holds the ones that come with Draftsmith") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as UTF-8 text: {error}") from None
    tree = _parse(text, str(path))
    if not isinstance(tree, dict):
        found = "nothing" if tree is None else f"a {type(tree).__name__}"
        raise ConfigError(f"{path}: expected a mapping of sections at the top, got {found}")
    return tree


def parse_override(override: str) -> tuple[list[str], Any]:
    """`training.steps=200` -> (["training", "steps"], 200); the value is YAML, nothing after `=` is null."""
    name, equals, value = override.partition("=")
    keys = name.strip().split(".")
    if not equals or not all(keys):
        raise ConfigError(f"command line: expected section.key=value, got '{override}'")
    return keys, _parse(value, f"command line: {override}")


def _parse(text: str, where: str) -> Any:
    try:
        return yaml.load(text, _Loader)  # a SafeLoader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f" line {mark.line + 1}, column {mark.column + 1}:" if mark else ""
        raise ConfigError(f"{where}:{line} {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{where}: not valid YAML: {error}") from None
