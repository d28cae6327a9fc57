"""The import name is `draftsmith`: nothing of a user's folder, and no other library, takes its
place."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import draftsmith

SCRIPT = """
from draftsmith import SamplingParams
import draftsmith.inference, draftsmith.speculators, draftsmith.train.cli
print(SamplingParams.__module__, SamplingParams().temperature)
"""


def test_import_beside_files_of_the_packages_names_finds_draftsmith(tmp_path):
    for name in ("train", "inference", "speculators"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the wrong module')\n")
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, tmp_path / "script.py"], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.stdout.split() == ["draftsmith.inference.sampling_params", "1.0"], done.stderr


def test_install_has_one_top_level_package():
    """`train`, `inference` and `speculators` are importable below `draftsmith` alone."""
    code = "import importlib.util as u; print([n for n in NAMES if u.find_spec(n)])"
    code = code.replace("NAMES", "('train', 'inference')")
    installed = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        capture_output=True,
        text=True,
        cwd=Path("/"),
        env=installed,
    )
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_public_names_are_those_of_vllm():
    assert set(draftsmith.__all__) >= {"LLM", "SamplingParams", "RequestOutput"}
    assert draftsmith.LLM.__name__ == "LLM"
    assert draftsmith.__version__
