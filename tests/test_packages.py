"""The packages: imports only go down and never in a circle (pyproject.toml has the contracts), and
no file of train/ hides a library."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("train", "inference", "speculators")
FOLDERS = ("/home/", "/root/", "/Users/", "/mnt/", "/work/", "/data/", "/tmp/", "/opt/", "C:\\")


@pytest.fixture(scope="module")
def trees() -> dict[str, ast.Module]:
    """Every file of the packages, parsed, by its path from the root."""
    files = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    return {
        path.relative_to(ROOT).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
        for path in files
    }


def test_imports_keep_the_contracts():
    """Layers and circles, as pyproject.toml says; imports inside functions and for types count
    too."""
    run = "from importlinter.cli import lint_imports_command as run; run()"
    done = subprocess.run(
        [sys.executable, "-c", run, "--no-cache"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_file_says_what_it_is_for_and_every_folder_is_a_package(trees):
    assert {path.partition("/")[0] for path in trees} == set(PACKAGES)
    silent = [path for path, tree in trees.items() if tree.body and not ast.get_docstring(tree)]
    assert not silent
    inits = {f"{os.path.dirname(path)}/__init__.py" for path in trees}
    assert not [path for path in inits if path not in trees or not ast.get_docstring(trees[path])]


def test_nothing_imports_scripts_or_tests_and_no_path_is_of_one_machine(trees):
    wrong = []
    for path, tree in trees.items():
        for node in ast.walk(tree):
            names = [name for name in _imports(node) if name.startswith(("scripts", "tests"))]
            wrong += [f"{path}: import of {name}" for name in names]
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                if node.value.startswith(FOLDERS):
                    wrong.append(f"{path}:{node.lineno}: {node.value[:40]!r}")
    assert not wrong


def _imports(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        yield node.module or ""


def test_launchers_of_all_names_are_the_same_program():
    """Links to one file in a checkout, copies of it in a wheel."""
    names = ("dflash", "distill", "dspark", "medusa", "mlp", "mtp")
    texts = {(ROOT / "train" / f"{name}.py").read_text(encoding="utf-8") for name in names}
    assert texts == {(ROOT / "train" / "eagle.py").read_text(encoding="utf-8")}


def test_files_of_train_hide_no_library():
    """`accelerate launch train/…` puts train/ first on sys.path."""
    names = {path.stem for path in (ROOT / "train").iterdir()} - {"__init__", "__pycache__"}
    installed = set(packages_distributions()) - set(PACKAGES)
    hidden = names & (set(sys.stdlib_module_names) | installed)
    assert not hidden
