"""The house: imports only go down and never in a circle (pyproject.toml has the contracts), and no
file of train/ hides a library."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FLOORS = ("train", "inference", "speculators")
FILES = sorted(path for floor in FLOORS for path in (ROOT / floor).rglob("*.py"))
# What files in train/ could be called by mistake; `accelerate launch` puts train/ first on
# sys.path.
LIBRARIES = {
    "accelerate",
    "datasets",
    "evaluate",
    "huggingface_hub",
    "jinja2",
    "matplotlib",
    "numpy",
    "pandas",
    "peft",
    "psutil",
    "pyarrow",
    "pydantic",
    "rich",
    "ruamel",
    "safetensors",
    "scipy",
    "tensorboard",
    "tokenizers",
    "torch",
    "tqdm",
    "transformers",
    "triton",
    "typer",
    "vllm",
    "wandb",
    "yaml",
}


@cache
def trees() -> dict[str, ast.Module]:
    """Every file of the floors, parsed, by its path from the root."""
    return {
        path.relative_to(ROOT).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
        for path in FILES
    }


def test_every_floor_has_files():
    assert {path.relative_to(ROOT).parts[0] for path in FILES} == set(FLOORS)


def test_imports_keep_the_contracts():
    """Floors, rooms and circles, as pyproject.toml says; imports inside functions and for types
    count too."""
    command = [
        sys.executable,
        "-c",
        "from importlinter.cli import lint_imports_command as run; run()",
        "--no-cache",
    ]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_nothing_imports_scripts_or_tests():
    wrong = []
    for path, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            else:
                names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            wrong += [
                f"{path}: {name}"
                for name in names
                if name.partition(".")[0] in ("scripts", "tests")
            ]
    assert not wrong


def test_a_room_says_what_lives_there_and_stays_small():
    parsed, wrong = trees(), []
    for folder in sorted({path.parent for path in FILES}):
        name = str(folder.relative_to(ROOT))
        if f"{name}/__init__.py" not in parsed:
            wrong.append(f"{name} has no __init__.py")
        elif not ast.get_docstring(parsed[f"{name}/__init__.py"]):
            wrong.append(f"{name}/__init__.py has no docstring")
        if len(list(folder.glob("*.py"))) > 16:
            wrong.append(f"{name} has more than 16 files; find it another room")
    assert not wrong


def test_no_file_of_train_hides_a_library():
    names = {path.stem for path in (ROOT / "train").glob("*.py")} | {
        p.name for p in (ROOT / "train").iterdir() if p.is_dir()
    }
    installed = {name for name in packages_distributions() if name not in FLOORS}
    hidden = sorted(
        names & (set(sys.stdlib_module_names) | LIBRARIES | installed) - {"__init__", "__pycache__"}
    )
    assert not hidden, (
        f"`accelerate launch train/...` would import {hidden} from train/ instead of the library"
    )


def test_no_absolute_paths():
    """A string that begins like somebody's folder works on one machine only."""
    folders = ("/home/", "/root/", "/Users/", "/mnt/", "/work/", "/data/", "/tmp/", "/opt/", "C:\\")
    wrong = []
    for path, tree in trees().items():
        strings = (
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        )
        wrong += [
            f"{path}:{n.lineno}: {n.value[:40]!r}" for n in strings if n.value.startswith(folders)
        ]
    assert not wrong


def test_every_module_says_what_it_is_for():
    assert [
        path for path, tree in trees().items() if tree.body and not ast.get_docstring(tree)
    ] == []
