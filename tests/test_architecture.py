"""ARCHITECTURE.md and CONTRIBUTING.md name files, functions and rooms that exist."""

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
    kinds, found = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef), set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, kinds):
            found.add(node.name)
            found |= {
                f"{node.name}.{inner.name}"
                for inner in getattr(node, "body", ())
                if isinstance(inner, kinds)
            }
    return found


def test_every_stop_of_the_walks_exists():
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


@pytest.mark.parametrize("floor", ["speculators", "inference", "train"])
def test_every_room_is_in_the_table_with_files_to_begin_with(floor):
    (table,) = re.findall(rf"^\| {floor}/ \|.*\n\|.*\n((?:\|.*\n)+)", TEXT, re.MULTILINE)
    rooms = {
        room for row in table.splitlines() for room in re.findall(r"`([\w/]+)/`", row.split("|")[1])
    }
    folders = {
        str(file.parent.relative_to(ROOT / floor)) for file in (ROOT / floor).rglob("*.py")
    } - {"."}
    assert folders - rooms <= {"vllm_bridge/connectors"}
    assert all((ROOT / floor / room).is_dir() for room in rooms)
    for row in table.splitlines():
        places = re.findall(r"`([\w/]+)/`", row.split("|")[1]) or [""]
        for file in re.findall(r"`([\w/]+\.py)`", row.split("|")[3]):
            assert any((ROOT / floor / place / file).is_file() for place in places), (places, file)


def test_paths_of_the_contributors_guides_exist():
    for page in ("CONTRIBUTING.md", "docs/adding-a-family.md"):
        text = (ROOT / page).read_text(encoding="utf-8")
        for path in re.findall(r"`((?:speculators|inference|train|tests|scripts)/[\w/.-]+)`", text):
            assert (ROOT / path).exists(), (page, path)
