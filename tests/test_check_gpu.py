"""tests/gpu/conftest.py: what `make check-gpu` does where a test ends the device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TESTS = """
import pytest
from tests.gpu import conftest

@pytest.mark.parametrize("place", range(4))
def test_it(place, device, report, monkeypatch):
    report(place=place)
    if place == 1:
        conftest.is_lost = lambda device: True
        raise RuntimeError("illegal address")
    assert conftest.is_lost(device) is False
"""


@pytest.mark.slow
def test_tests_behind_one_that_ends_the_device_run_elsewhere_and_all_is_measured(tmp_path: Path):
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    words = [sys.executable, "-m", "pytest", "test_it.py", "-p", "tests.gpu.conftest", "-v"]
    words += ["-p", "no:cacheprovider", "--device", "cpu", "--measured", "measured.json"]
    path = os.pathsep.join([str(ROOT), str(ROOT / "src"), *sys.path])
    ran = subprocess.run(
        words, cwd=tmp_path, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True
    )
    assert ran.returncode != 0, ran.stdout
    assert ran.stdout.count("PASSED") == 3 and "1 failed" in ran.stdout, ran.stdout + ran.stderr
    results = json.loads((tmp_path / "measured.json").read_text())["results"]
    assert [x["place"] for x in results] == [0, 1, 2, 3]
