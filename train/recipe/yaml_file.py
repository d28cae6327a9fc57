"""YAML 1.2 as recipes mean it: duplicate keys refused, errors with file and line, `1e-4` a number, `no` a word.

It knows no key of a recipe.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.constructor import ConstructorError, SafeConstructor
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from speculators.errors import ConfigError


class _Constructor(SafeConstructor):
    """Builds plain data; a date is a string, as any other name."""

    def check_mapping_key(self, node: Any, key_node: Any, mapping: Any, key: Any, value: Any) -> bool:
        if isinstance(key, tuple):
            raise ConstructorError(None, None, "a list cannot be a key", key_node.start_mark)
        if key in mapping:
            first = next(other.start_mark.line + 1 for other, _ in node.value if other.value == key_node.value)
            told = f"duplicate key '{key}' (first on line {first}); keep one of them"
            raise ConstructorError(None, None, told, key_node.start_mark)
        return True


_Constructor.add_constructor("tag:yaml.org,2002:timestamp", SafeConstructor.construct_yaml_str)


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
    parser = YAML(typ="safe", pure=True)
    parser.Constructor = _Constructor
    try:
        return parser.load(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f" line {mark.line + 1}, column {mark.column + 1}:" if mark else ""
        raise ConfigError(f"{where}:{line} {error.problem or error.context}") from None
    except YAMLError as error:
        raise ConfigError(f"{where}: not valid YAML: {error}") from None
