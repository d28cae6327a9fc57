"""The house: imports only go down and never in a circle (pyproject.toml has the contracts), and no file of train/ hides
a library.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FLOORS = ("train", "inference", "speculators")
FILES = sorted(path for floor in FLOORS for path in (ROOT / floor).rglob("*.py"))
# What files in train/ could be called by mistake; `accelerate launch` puts train/ first on sys.path.
LIBRARIES = {
    "accelerate", "datasets", "evaluate", "huggingface_hub", "jinja2", "matplotlib", "numpy", "pandas", "peft",
    "psutil", "pyarrow", "pydantic", "rich", "ruamel", "safetensors", "scipy", "tensorboard", "tokenizers", "torch",
    "tqdm", "transformers", "triton", "typer", "vllm", "wandb", "yaml",
}  # fmt: skip


def test_every_floor_has_files():
    assert {path.relative_to(ROOT).parts[0] for path in FILES} == set(FLOORS)


def test_imports_keep_the_contracts():
    """Floors, rooms and circles, as pyproject.toml says; imports inside functions and for types count too."""
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as run; run()", "--no-cache"]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_imports_scripts_or_tests(path):
    tree = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    names = [alias.name for node in tree if isinstance(node, ast.Import) for alias in node.names]
    tree = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    names += [node.module or "" for node in tree if isinstance(node, ast.ImportFrom)]
    wrong = [name for name in names if name.partition(".")[0] in ("scripts", "tests")]
    assert not wrong, f"{path.relative_to(ROOT)} imports {wrong}"


@pytest.mark.parametrize(
    "folder", sorted({path.parent for path in FILES}), ids=lambda path: str(path.relative_to(ROOT))
)
def test_a_room_says_what_lives_there_and_stays_small(folder):
    face = folder / "__init__.py"
    assert face.is_file(), f"{folder.relative_to(ROOT)} has no __init__.py"
    assert ast.get_docstring(ast.parse(face.read_text(encoding="utf-8"))), f"{face.relative_to(ROOT)} has no docstring"
    assert len(list(folder.glob("*.py"))) <= 16, (
        f"{folder.relative_to(ROOT)} has more than 16 files; find it another room"
    )


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
