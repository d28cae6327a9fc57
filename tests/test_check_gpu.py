"""The check for machines with a GPU, run as on one, at tiny shapes on this CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def check(output: Path, *options: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / "scripts" / "check_gpu.py"), "--device", "cpu", "--output", str(output)]
    return subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True, env=None)


@pytest.mark.slow
def test_its_parts_run_once_and_a_part_that_fails_fails_it(tmp_path):
    output = tmp_path / "figures.json"
    ran = check(output, "--parts", "versions,training,decoding,overlap,sharding")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = json.loads(output.read_text())["cpu/tiny"]
    assert {name: part["state"] for name, part in found.items()} == {
        "versions": "ok", "training": "ok", "decoding": "ok", "overlap": "skipped", "sharding": "ok",
    }  # fmt: skip
    training = found["training"]["figures"]
    assert training["tokens_per_second"] > 0 and training["planned_gb"] > 0
    assert found["decoding"]["figures"]["ways_with_the_same_tokens"] == 2
    assert check(output, "--parts", "training,overlap").returncode == 0
    assert json.loads(output.read_text())["cpu/tiny"] == found  # nothing was done again
    ran = check(output, "--parts", "versions", "--again", "--limit", "0.01")
    assert ran.returncode == 1 and "took longer" in ran.stdout
