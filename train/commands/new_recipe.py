"""A new recipe: its name after the target, its keys with comments, and its YAML."""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq

from draftsmith.speculators.errors import ConfigError
from draftsmith.speculators.hub import repository_id
from draftsmith.train.recipe.recipe import Recipe, make_recipe, recipe_class
from draftsmith.train.recipe.schema import explain

# Folders that say what they hold and not which model it is.
GENERIC = re.compile(
    r"(models?|target|export|weights|checkpoints?|snapshots|outputs?|merged|final|best|last|latest"
    r"|hf|main|(checkpoint|step|epoch)[-_]?\d+|[0-9a-f]{40})",
    re.IGNORECASE,
)
# In the order of the file.
SECTIONS = ("drafter", "data", "regenerate", "loss", "training", "evaluation", "gates")
WIDTH = 4096  # columns: a line is not folded, since its comment would move


def run_name(model: str, family: str) -> str:
    """A run's name after its target, such as `qwen3-8b-eagle3`. A folder that is called `model` or
    `checkpoint-123` is named as its config.json says, or as the first folder above that has a
    name."""
    names = (_slug(name) for name in _names(model) if not GENERIC.fullmatch(name))
    return f"{next(filter(None, names), 'target')}-{family}"


def _names(model: str) -> Iterator[str]:
    if repository := repository_id(model):
        yield repository.rpartition("/")[2]
        return
    folder = Path(os.path.abspath(model))
    yield folder.name
    yield Path(_name_in_config(folder)).name
    yield from (parent.name for parent in folder.parents)


def _name_in_config(folder: Path) -> str:
    """Empty if it says none."""
    try:
        fields = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ""
    return str(fields.get("_name_or_path") or "") if isinstance(fields, dict) else ""


def _slug(name: str) -> str:
    """The name in letters, digits, dots and dashes, as a recipe's name has to be; empty if it has
    none."""
    text = re.sub(r"[^\w.-]+", "-", name).strip("-._").lower()
    return text if not text or text[0].isascii() else f"model-{text}"


class NewRecipe:
    """A recipe in the making. `tree`: its keys in the order of the file; `comments`: texts beside
    dotted keys; `above`: lines above them."""

    def __init__(self, model: str, family: str) -> None:
        name = run_name(model, family)
        self.tree: dict[str, Any] = {"name": name, "family": family, "target": {"model": model}}
        self.tree |= {section: {} for section in SECTIONS}
        self.comments = {"name": f"its folder is runs/{name}"}
        self.above: dict[str, str] = {}

    def put(self, key: str, value: Any, comment: str = "") -> None:
        """Sets `section.key`, and its comment if there is one."""
        section, _, name = key.partition(".")
        self.tree[section][name] = value
        if comment:
            self.comments[key] = comment

    def checked(self) -> Recipe:
        """ConfigError if it is none."""
        try:
            return make_recipe(self.filled())
        except ValidationError as error:
            model = recipe_class(self.tree["family"])
            raise ConfigError(explain(error, model), where="init") from None

    def filled(self) -> dict[str, Any]:
        """The tree without empty sections."""
        return {key: value for key, value in self.tree.items() if value != {}}

    def yaml(self) -> str:
        """The file, without empty sections."""
        document = _commented(self.filled())
        for key, text in self.comments.items():
            section, name = _place(document, key)
            section.yaml_add_eol_comment(text, name, column=0)  # a space behind the value
        for key, text in self.above.items():
            section, name = _place(document, key)
            section.yaml_set_comment_before_after_key(name, text, indent=2 * key.count("."))
        writer: Any = YAML()
        writer.width = WIDTH
        writer.indent(mapping=2, sequence=4, offset=2)
        out = io.StringIO()
        writer.dump(document, out)
        return out.getvalue()


def _place(document: CommentedMap, key: str) -> tuple[CommentedMap, str]:
    """The mapping that holds a dotted key, and the key's last part."""
    *sections, name = key.split(".")
    for section in sections:
        document = document[section]
    return document, name


def _commented(value: Any, depth: int = 0) -> Any:
    """Mappings and lists that take comments; what lies inside a section stands in one line."""
    if isinstance(value, Mapping):
        mapping = CommentedMap((key, _commented(item, depth + 1)) for key, item in value.items())
        if depth > 1:
            mapping.fa.set_flow_style()
        return mapping
    if isinstance(value, list | tuple):
        sequence = CommentedSeq(_commented(item, depth + 1) for item in value)
        if not any(isinstance(item, Mapping) for item in value):
            sequence.fa.set_flow_style()
        return sequence
    return value
