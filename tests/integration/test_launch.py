"""`accelerate launch` with the shipped configurations: the same run on one process, two, two sharded, two machines."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch.testing import assert_close

from tests.integration.test_pipeline import recipe, tiny_target  # noqa: F401
from train import checkpoint

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "recipes" / "accelerate"
CURVE = ("loss", "grad_norm", "in_loop_acceptance_length", "terms")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def launch(path: Path, out: Path, config: str | None, *options: str, overrides: tuple[str, ...] = ()):
    """A process of `accelerate launch` that trains the recipe into `out`."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "--num_cpu_threads_per_process", "1"]
    if config is not None:
        command += ["--config_file", str(CONFIGS / config)]
    if "--main_process_port" not in options:
        command += ["--main_process_port", str(free_port())]
    command += [*options, str(ROOT / "train" / "eagle.py"), str(path), f"output_dir={out}", *overrides]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True, **pipes)


def finished(process: subprocess.Popen) -> str:
    said, _ = process.communicate(timeout=900)
    assert process.returncode == 0, said[-4000:]
    return said


def result(out: Path) -> tuple[list[list[float]], dict]:
    """The curve of a run, and its export."""
    state = json.loads((checkpoint.latest(out / "checkpoints") / "state.json").read_text())
    return [[record[name] for name in CURVE] for record in state["history"]], load_file(
        out / "export" / "model.safetensors"
    )


def assert_same(one: Path, other: Path) -> None:
    (curve, export), (found, exported) = result(one), result(other)
    assert_close(torch.tensor(found), torch.tensor(curve), atol=1e-4, rtol=1e-4)
    assert export.keys() == exported.keys()
    for name, tensor in export.items():
        assert_close(exported[name], tensor, atol=1e-4, rtol=0, msg=name)


@pytest.fixture
def short_recipe(recipe: Path) -> Path:  # noqa: F811
    """Of test_pipeline, with a global batch, in float32."""
    tree = yaml.safe_load(recipe.read_text())
    tree |= {
        "training": {"steps": 6, "global_batch_size": 4, "batch_size": 2, "mixed_precision": "no", "save_every": 2}
    }
    tree |= {"trackers": [], "export": {"dtype": "float32"}}
    tree["evaluation"] |= {"repeats": 0, "lossless_check": False, "baseline_transformers": False}
    recipe.write_text(yaml.safe_dump(tree))
    return recipe


@pytest.mark.integration
def test_shipped_configurations_train_alike(short_recipe, tmp_path):
    """One process; two, whole and sharded; two machines that are one; killed on two and continued on one."""
    runs = {name: tmp_path / name for name in ("one", "two", "sharded", "machines", "killed")}
    finished(launch(short_recipe, runs["one"], None, "--num_processes", "1"))
    finished(launch(short_recipe, runs["two"], "cpu_ddp.yaml"))
    finished(launch(short_recipe, runs["sharded"], "cpu_fsdp2.yaml", overrides=("target.sharding=fsdp",)))
    port = str(free_port())
    where = ("--num_processes", "2", "--main_process_ip", "127.0.0.1", "--main_process_port", port)
    pair = [
        launch(short_recipe, runs["machines"], "multi_node_ddp.yaml", "--machine_rank", rank, *where) for rank in "01"
    ]
    for process in pair:
        finished(process)
    killed = launch(short_recipe, runs["killed"], "cpu_ddp.yaml")
    while not list((runs["killed"] / "checkpoints").glob("step-*")) and killed.poll() is None:
        time.sleep(0.2)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate()
    finished(launch(short_recipe, runs["killed"], None, "--num_processes", "1"))
    for name in ("two", "sharded", "machines", "killed"):
        assert_same(runs["one"], runs[name])


@pytest.mark.integration
def test_a_target_goes_from_the_hosts_memory_to_its_shards(short_recipe, tmp_path):
    """Where it is asked for nothing before: responses are the data's, and nothing is held out."""
    given = ("regenerate.enabled=false", "data.validation=[]", "evaluation.max_tokens=8")
    finished(launch(short_recipe, tmp_path / "one", None, "--num_processes", "1", overrides=given))
    sharded = (*given, "target.sharding=fsdp")
    said = finished(launch(short_recipe, tmp_path / "two", "cpu_ddp.yaml", overrides=sharded))
    assert "waits in the host's memory" in said
    assert_same(tmp_path / "one", tmp_path / "two")
