"""Imports only go down, and no file of train/ hides a library: read from the source, nothing is imported.

train -> inference -> speculators
"""

from __future__ import annotations

import ast
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FLOORS = {  # floor -> the floors it may import
    "speculators": {"speculators"},
    "inference": {"inference", "speculators"},
    "train": {"train", "inference", "speculators"},
}
FILES = sorted(path for floor in FLOORS for path in (ROOT / floor).rglob("*.py"))
# What files in train/ could be called by mistake; `accelerate launch` puts train/ first on sys.path.
LIBRARIES = {
    "accelerate", "datasets", "evaluate", "huggingface_hub", "jinja2", "matplotlib", "numpy", "pandas", "peft",
    "psutil", "pyarrow", "pydantic", "rich", "ruamel", "safetensors", "scipy", "tensorboard", "tokenizers", "torch",
    "tqdm", "transformers", "triton", "typer", "vllm", "wandb", "yaml",
}  # fmt: skip


def imports(path: Path) -> list[tuple[int, str]]:
    """(line, absolute module name) of every import of a file, inside functions too."""
    found = []
    package = path.relative_to(ROOT).parts[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            found.append((node.lineno, ".".join(part for part in (base, node.module or "") if part)))
    return found


def test_every_floor_has_files():
    assert {path.relative_to(ROOT).parts[0] for path in FILES} == set(FLOORS)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_only_go_down(path):
    allowed = FLOORS[path.relative_to(ROOT).parts[0]]
    forbidden = (set(FLOORS) | {"scripts", "tests"}) - allowed
    wrong = [f"line {line}: {name}" for line, name in imports(path) if name.partition(".")[0] in forbidden]
    assert not wrong, f"{path.relative_to(ROOT)} may import {sorted(allowed)} only; {'; '.join(wrong)}"


def test_no_file_of_train_hides_a_library():
    names = {path.stem for path in (ROOT / "train").glob("*.py")} | {
        p.name for p in (ROOT / "train").iterdir() if p.is_dir()
    }
    installed = {name for name in packages_distributions() if name not in FLOORS}
    hidden = sorted(names & (set(sys.stdlib_module_names) | LIBRARIES | installed) - {"__init__", "__pycache__"})
    assert not hidden, f"`accelerate launch train/...` would import {hidden} from train/ instead of the library"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_absolute_paths(path):
    """A string that begins like somebody's folder works on one machine only."""
    folders = ("/home/", "/root/", "/Users/", "/mnt/", "/work/", "/data/", "/tmp/", "/opt/", "C:\\")
    strings = (node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Constant))
    wrong = [
        f"line {n.lineno}: {n.value[:40]!r}"
        for n in strings
        if isinstance(n.value, str) and n.value.startswith(folders)
    ]
    assert not wrong, f"{path.relative_to(ROOT)}: {'; '.join(wrong)}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_module_says_what_it_is_for(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert not tree.body or ast.get_docstring(tree), f"{path.relative_to(ROOT)} has no docstring"
