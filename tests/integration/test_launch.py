"""`accelerate launch`: the same run on one process, two, two sharded."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.testing import assert_close

from draftsmith.train.recipe.load import read
from draftsmith.train.recipe.recipe import yaml_text
from draftsmith.train.trainer import checkpoint
from tests.support.forked import PythonProcess, free_port, interpreter

ROOT = Path(__file__).resolve().parents[2]
# started as on GPUs; without one they are on the CPU
TWO = "--num_processes 2 --num_machines 1 --mixed_precision no".split()
# As docs/training.md has them.
SHARDED = "--use_fsdp --fsdp_version 2 --fsdp_cpu_ram_efficient_loading false".split()
CURVE = ("loss", "grad_norm", "in_loop_acceptance_length", "terms")


@pytest.fixture(autouse=True)
def _forked(monkeypatch):
    monkeypatch.setattr(sys, "executable", interpreter())


def launch(path: Path, out: Path, options: list[str], *, overrides: tuple[str, ...] = ()):
    """`accelerate launch` of two processes that train the recipe into `out`."""
    command = [
        *(sys.executable, "-m", "accelerate.commands.launch"),
        *("--num_cpu_threads_per_process", "1", *TWO, *(options or ["--multi_gpu"])),
        *("--main_process_port", str(free_port())),
        *(str(ROOT / "train" / "eagle.py"), str(path), f"output_dir={out}", *overrides),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    environment["ACCELERATE_USE_CPU"] = "true"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True, **pipes)


def alone(path: Path, out: Path, *overrides: str) -> PythonProcess:
    """The same on one process, without the launcher."""
    return PythonProcess(ROOT / "train" / "eagle.py", path, f"output_dir={out}", *overrides)


def finished(process: subprocess.Popen) -> str:
    """What a process printed; of one that failed its own errors first, and where it crashed, which
    the launcher's account of all processes would hide."""
    output, _ = process.communicate(timeout=900)
    errors = [line for line in output.splitlines() if line.startswith("error:")]
    _, crash, stack = output.partition("Fatal Python error")
    assert process.returncode == 0, "\n".join([*errors, crash + stack[:4000], output[-4000:]])
    return output


def result(out: Path) -> tuple[list[list[float]], dict]:
    """The curve of a run, and its export."""
    state = checkpoint.read_state(checkpoint.latest(out / "checkpoints"))
    return [[record[name] for name in CURVE] for record in state.history], load_file(
        out / "export" / "model.safetensors"
    )


def assert_same(one: Path, other: Path) -> None:
    (curve, export), (other_curve, exported) = result(one), result(other)
    assert_close(torch.tensor(other_curve), torch.tensor(curve), atol=1e-4, rtol=1e-4)
    assert export.keys() == exported.keys()
    for name, tensor in export.items():
        assert_close(exported[name], tensor, atol=1e-4, rtol=0, msg=name)


@pytest.fixture
def short_recipe(recipe: Path) -> Path:
    """The recipe with a global batch, in float32."""
    tree = read(recipe)
    tree |= {
        "training": {
            "preset": "published",
            "steps": 6,
            "global_batch_size": 4,
            "batch_size": 2,
            "mixed_precision": "no",
            "save_every": 2,
        }
    }
    tree |= {"trackers": [], "export": {"dtype": "float32"}}
    tree["evaluation"] |= {"repeats": 0, "lossless_check": False, "temperatures": [0.0]}
    recipe.write_text(yaml_text(tree))
    return recipe


@pytest.mark.integration
def test_processes_and_shards_train_alike(short_recipe, tmp_path):
    """One process; two, whole and sharded; killed on two and continued on one."""
    runs = {name: tmp_path / name for name in ("one", "two", "sharded", "killed")}
    finished(alone(short_recipe, runs["one"]))
    finished(launch(short_recipe, runs["two"], []))
    finished(launch(short_recipe, runs["sharded"], SHARDED, overrides=("target.sharding=fsdp",)))
    killed = launch(short_recipe, runs["killed"], [])
    while not list((runs["killed"] / "checkpoints").glob("step-*")) and killed.poll() is None:
        time.sleep(0.2)
    killed.kill()  # and with it what it started
    killed.communicate()
    finished(alone(short_recipe, runs["killed"]))
    for name in ("two", "sharded", "killed"):
        assert_same(runs["one"], runs[name])


@pytest.mark.integration
def test_a_target_that_is_read_in_shards_trains_the_same_head(short_recipe, tmp_path):
    """Where it is asked for nothing before: responses are the data's, and nothing is held out."""
    overrides = ("regenerate.enabled=false", "data.validation=[]", "evaluation.max_tokens=8")
    finished(alone(short_recipe, tmp_path / "one", *overrides))
    sharded = (*overrides, "target.sharding=fsdp")
    output = finished(launch(short_recipe, tmp_path / "two", [], overrides=sharded))
    assert "the whole target" not in output
    assert_same(tmp_path / "one", tmp_path / "two")
