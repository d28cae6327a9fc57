"""Processes of this interpreter, with this checkout on their path."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {"PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT)))}


def start_python(*arguments: object) -> subprocess.Popen[str]:
    """`python *arguments` with one thread; its input is a pipe, and so is its output with its
    errors."""
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **ENVIRONMENT, "OMP_NUM_THREADS": "1"},
    )
