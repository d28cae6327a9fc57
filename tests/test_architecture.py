"""ARCHITECTURE.md and CONTRIBUTING.md name files, functions and packages that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
STOPS = re.findall(
    r"`((?:speculators|inference|train)/[\w/]+\.py)(?:: ([\w.]+))?`(?:, `([\w.]+)`)?", TEXT
)


def definitions(path: Path) -> set[str]:
    """Functions and classes of a module, and `Class.method`."""
    kinds, names = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef), set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, kinds):
            names.add(node.name)
            names |= {
                f"{node.name}.{inner.name}"
                for inner in getattr(node, "body", ())
                if isinstance(inner, kinds)
            }
    return names


def test_architecture_walks_name_functions_that_exist():
    assert len(STOPS) > 25
    missing = []
    for path, *names in STOPS:
        if not (ROOT / path).is_file():
            missing.append(path)
            continue
        known = definitions(ROOT / path)
        missing += [
            f"{path}: {name}"
            for name in names
            if name and not name.endswith(".py") and name not in known
        ]
    assert not missing


@pytest.mark.parametrize("layer", ["speculators", "inference", "train"])
def test_architecture_lists_every_package_with_files_to_begin_with(layer):
    (table,) = re.findall(rf"^\| {layer}/ \|.*\n\|.*\n((?:\|.*\n)+)", TEXT, re.MULTILINE)
    packages = {
        package
        for row in table.splitlines()
        for package in re.findall(r"`([\w/]+)/`", row.split("|")[1])
    }
    folders = {
        str(file.parent.relative_to(ROOT / layer)) for file in (ROOT / layer).rglob("*.py")
    } - {"."}
    assert folders - packages <= {"vllm_bridge/connectors"}
    assert all((ROOT / layer / package).is_dir() for package in packages)
    for row in table.splitlines():
        inside = re.findall(r"`([\w/]+)/`", row.split("|")[1]) or [""]
        for file in re.findall(r"`([\w/]+\.py)`", row.split("|")[3]):
            assert any((ROOT / layer / place / file).is_file() for place in inside), (inside, file)


def test_contributors_guides_name_paths_that_exist():
    for page in ("CONTRIBUTING.md", "docs/adding-a-family.md"):
        text = (ROOT / page).read_text(encoding="utf-8")
        for path in re.findall(r"`((?:speculators|inference|train|tests|scripts)/[\w/.-]+)`", text):
            assert (ROOT / path).exists(), (page, path)
