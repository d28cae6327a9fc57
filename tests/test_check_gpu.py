"""The check for machines with a GPU, run as on one, at tiny shapes on this CPU."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import typer

from scripts import check_gpu
from scripts.check_gpu import Skipped, make_trainer
from train.planner.devices import DEVICES, recognised


@pytest.mark.slow
def test_its_parts_run_once_and_a_part_that_fails_fails_it(interpreter, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", interpreter)
    output = tmp_path / "figures.json"

    def check(parts: str, again: bool = False, limit: float = 300) -> int:
        with pytest.raises(typer.Exit) as ended:
            check_gpu.main(device="cpu", parts=parts, again=again, output=output, limit=limit)
        return ended.value.exit_code

    assert check("versions,training,overlap,sharding") == 0
    found = json.loads(output.read_text())["cpu/tiny"]
    assert {name: part["state"] for name, part in found.items()} == {
        "versions": "ok",
        "training": "ok",
        "overlap": "skipped",
        "sharding": "ok",
    }
    training = found["training"]["figures"]
    assert training["tokens_per_second"] > 0 and training["planned_gb"] > 0
    assert check("versions,training") == 0
    assert json.loads(output.read_text())["cpu/tiny"] == found  # nothing was done again
    assert check("versions", again=True, limit=0.01) == 1
    assert "took longer" in json.loads(output.read_text())["cpu/tiny"]["versions"]["reason"]


@pytest.mark.slow
def test_eager_and_compiled_rounds_write_the_same_tokens(traced):
    done = check_gpu.one_part("decoding", "tiny", "cpu")
    assert done["state"] == "ok" and done["figures"]["ways_with_the_same_tokens"] == 2


@pytest.mark.slow
def test_a_part_that_takes_too_long_ends_with_all_that_it_started(tmp_path, monkeypatch):
    part = tmp_path / "part.py"
    part.write_text(
        "import pathlib, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"pathlib.Path({str(tmp_path)!r}, 'child').write_text(str(child.pid))\n"
        "time.sleep(600)\n"
    )
    monkeypatch.setattr(check_gpu, "__file__", str(part))
    found = check_gpu.run_part("versions", "tiny", "cpu", 3)
    assert found["state"] == "failed" and "took longer" in found["reason"]
    child = int((tmp_path / "child").read_text())
    try:
        assert _ends(child)
    finally:
        if not _ends(child, 0):
            os.kill(child, 9)


def _ends(process: int, seconds: float = 5) -> bool:
    """Whether it does, within so many seconds; one that nobody has asked about yet counts as
    ended."""
    until = time.monotonic() + seconds
    while True:
        try:
            state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z" or time.monotonic() > until:
            return state == "Z"
        time.sleep(0.05)


def test_the_versions_of_a_gpu(monkeypatch):
    gpu = SimpleNamespace(
        name="NVIDIA H100 80GB HBM3", major=9, minor=0, total_memory=84_900_000_000
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    monkeypatch.setattr(check_gpu, "rates", lambda device: {"product_tflops": 700.0})
    found = check_gpu.versions({}, torch.device("cuda"))
    assert (
        found["capability"] == "9.0"
        and found["sheet_tflops"] == DEVICES["h100"].flops["bfloat16"] / 1e12
    )
    assert json.loads(json.dumps(found)) == found


@pytest.mark.parametrize(
    "name, gib, key",
    [
        ("NVIDIA H100 80GB HBM3", 79.1, "h100"),
        ("NVIDIA H100 PCIe", 79.2, "h100-pcie"),
        ("NVIDIA H200", 139.8, "h200"),
        ("NVIDIA A100-SXM4-80GB", 79.3, "a100-80"),
        ("NVIDIA A100-PCIE-40GB", 39.4, "a100-40"),
        ("NVIDIA L4", 22.0, "l4"),
        ("NVIDIA L40S", 44.4, "l40s"),
        ("NVIDIA GeForce RTX 4090", 23.5, "rtx4090"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 9.5, None),
        ("NVIDIA GeForce RTX 3090", 23.6, None),
        ("NVIDIA GH200 480GB", 94.5, None),
    ],
)
def test_gpus_are_known_by_the_names_that_their_drivers_give_them(name, gib, key):
    assert recognised(name, gib * 2**30) == (key and DEVICES[key])


def test_what_does_not_fit_is_skipped_before_a_weight_is_made(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (24 * 10**9, 24 * 10**9))
    with pytest.raises(Skipped, match=r"needs \d\d\.\d GB and 24.0 are free"):
        make_trainer(check_gpu.SIZES["8b"], torch.device("cuda"), tmp_path)


def test_the_plan_beside_a_step_is_of_the_rows_that_it_trains_on(tmp_path):
    trainer, plan = make_trainer(check_gpu.SIZES["tiny"], torch.device("cpu"), tmp_path)
    assert plan.tokens == sum(len(row.input_ids) for row in trainer.rows)
    assert plan.supervised == sum(int(row.loss_mask.sum()) for row in trainer.rows)


def test_a_reason_is_shown_as_it_is(tmp_path, monkeypatch, capsys):
    failed = {"state": "failed", "reason": "no kernel in [/usr/lib]", "seconds": 1.0}
    monkeypatch.setattr(check_gpu, "run_part", lambda *_: failed)
    with pytest.raises(typer.Exit) as ended:
        check_gpu.main(
            device="cpu",
            size="tiny",
            parts="versions",
            again=False,
            output=tmp_path / "f.json",
            limit=1,
            one="",
        )
    assert ended.value.exit_code == 1 and "[/usr/lib]" in capsys.readouterr().out
