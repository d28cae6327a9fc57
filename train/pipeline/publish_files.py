"""What of a drafter may leave this machine: which files, and names in place of the paths in them.

Knows files and trees of JSON; no report and no recipe by its type.
"""

from __future__ import annotations

import html
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

SENT = (
    "*.safetensors", "*.safetensors.index.json", "config.json", "generation_config.json", "adapter_config.json",
    "tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "vocab.txt",
    "tokenizer.model", "*.jinja", "LICENSE*", "NOTICE*",
)  # fmt: skip
NAMING = ("config.json", "adapter_config.json", "generation_config.json", "tokenizer_config.json")
NAMES = ("_name_or_path", "name_or_path", "base_model_name_or_path")  # keys of these that may hold a path

Renaming = Mapping[str, str]  # what names something on this machine -> what others know it by


def link_files(export: Path, out: Path, paths: Renaming, kept: Iterable[str]) -> list[str]:
    """Links what is sent into `out`, or copies it with names in place of `paths`; returns what is neither sent nor
    `kept`."""
    left_out = []
    for path in sorted(export.rglob("*")):
        name = path.relative_to(export)
        if not path.is_file() or any(part.startswith(".") for part in name.parts):
            continue
        if any(fnmatch(path.name, pattern) for pattern in SENT):
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            _place(path, out / name, paths)
        elif name.as_posix() not in kept:
            left_out.append(name.as_posix())
    return left_out


def _place(path: Path, there: Path, paths: Renaming) -> None:
    """A link, or a copy where names stand for paths or the file system has no links."""
    if path.name in NAMING:
        fields = json.loads(path.read_text(encoding="utf-8"))
        public = renamed(fields, {**local_paths({key: fields.get(key) for key in NAMES}), **paths})
        if public != fields:
            there.write_text(json.dumps(public, indent=2) + "\n", encoding="utf-8")
            return
    try:
        os.symlink(path.resolve(), there)
    except OSError:
        shutil.copyfile(path, there)


def local_paths(*trees: Any) -> dict[str, str]:
    """Absolute paths among the strings of trees -> their last parts; the longest first."""
    paths = {text for tree in trees for text in _strings(tree) if _is_local(text)}
    return {path: Path(path).name for path in sorted(paths, key=len, reverse=True)}


def renamed(tree: Any, paths: Renaming) -> Any:
    """A tree with names in place of the strings that are paths."""
    if isinstance(tree, dict):
        return {key: renamed(value, paths) for key, value in tree.items()}
    if isinstance(tree, list):
        return [renamed(value, paths) for value in tree]
    return paths.get(tree, tree) if isinstance(tree, str) else tree


def renamed_in_page(page: str, paths: Renaming) -> str:
    """The same in a text of HTML, wherever they stand."""
    for path, name in paths.items():
        for written, instead in ((path, name), (html.escape(path), html.escape(name)), (json.dumps(path)[1:-1], name)):
            page = page.replace(written, instead)
    return page


def _is_local(text: str) -> bool:
    absolute = Path(text).is_absolute() and len(Path(text).parts) > 2  # "/no_think" is none
    return "\n" not in text and (absolute or text.startswith("~/") or text[1:3] in (":\\", ":/"))


def _strings(tree: Any) -> list[str]:
    if isinstance(tree, dict):
        return [text for value in tree.values() for text in _strings(value)]
    if isinstance(tree, list):
        return [text for value in tree for text in _strings(value)]
    return [tree] if isinstance(tree, str) else []
