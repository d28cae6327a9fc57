"""Fixtures of whole runs."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from tests.support.forked import Interpreter


@pytest.fixture(scope="session")
def interpreter():
    """The path of a program that does what sys.executable does, in a process that has torch
    imported already (tests/support/forked.py)."""
    with tempfile.TemporaryDirectory() as folder:  # short: the path of a socket is limited
        stand_in = Interpreter(Path(folder))
        yield stand_in.path
        stand_in.close()
