"""The device and the shapes of the tests that need a GPU: `make check-gpu`.

With `--device cpu` the same tests run at tiny shapes on any machine. An error that ends the device
for its process, as an illegal address does, ends one test: the others go on in a new process."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.measuring import QWEN3_8B, TINY_QWEN3


@dataclass(frozen=True)
class Shapes:
    """A random Qwen3 target, an EAGLE-3 head for it, and the work they are given."""

    config: dict[str, int]
    dtype: str
    draft_vocab_size: int
    unroll_steps: int
    max_length: int
    batch_size: int
    steps: int
    prompt: int  # tokens
    written: int


LARGE = Shapes(  # Qwen3-8B's
    QWEN3_8B | {"max_position_embeddings": 4096},
    "bfloat16",
    draft_vocab_size=32000,
    unroll_steps=7,
    max_length=2048,
    batch_size=2,
    steps=5,
    prompt=128,
    written=64,
)
TINY = Shapes(
    TINY_QWEN3,
    "float32",
    draft_vocab_size=128,
    unroll_steps=3,
    max_length=128,
    batch_size=2,
    steps=3,
    prompt=16,
    written=16,
)


MEASURED = pytest.StashKey[list[dict[str, Any]]]()
LEFT = pytest.StashKey[list[str]]()  # tests behind one that has ended the device
BEFORE = "DRAFTSMITH_MEASURED_BEFORE"  # variable: what processes before have measured, as JSON


def pytest_addoption(parser: Any) -> None:
    parser.addoption("--device", choices=("cuda", "cpu"), default="cuda", help="of tests/gpu")
    parser.addoption("--measured", metavar="FILE", help="of what tests/gpu report, as JSON")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[MEASURED] = json.loads(os.environ.get(BEFORE, "[]"))
    config.stash[LEFT] = []


def pytest_sessionfinish(session: pytest.Session) -> None:
    if BEFORE in os.environ and session.exitstatus == 0:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED  # the one that has ended the device


def pytest_unconfigure(config: pytest.Config) -> None:
    if config.stash[LEFT]:
        run_left(config)
    file, measured = config.getoption("--measured", None), config.stash[MEASURED]
    if file and measured:
        name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
        tree = {"machine": f"{name}, torch {torch.__version__}", "results": measured}
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        Path(file).write_text(json.dumps(tree, indent=1))


def run_left(config: pytest.Config) -> None:
    """Puts a process that runs the tests that are left into the place of this one, which still
    holds memory of the device."""
    given = [x for x in config.invocation_params.args if x not in config.args]
    os.environ[BEFORE] = json.dumps(config.stash[MEASURED])
    os.chdir(config.rootpath)
    config.pluginmanager.getplugin("capturemanager").suspend_global_capture(in_=True)
    sys.stdout.flush()
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    os.execv(sys.executable, [sys.executable, "-m", "pytest", *given, *config.stash[LEFT]])


def is_lost(device: torch.device) -> bool:
    """True if an error has ended the device for this process."""
    try:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """The device under test; skips where there is no GPU."""
    name = request.config.getoption("--device", "cuda")
    if name == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device; `make check-gpu ARGS='--device cpu'` tries the tests on a CPU")
    chosen = torch.device(name)
    yield chosen
    if is_lost(chosen) and not request.config.getoption("maxfail"):
        items = request.session.items
        left = items[items.index(request.node) + 1 :]
        request.config.stash[LEFT] = [item.nodeid for item in left]
        request.session.shouldstop = "the device is of no more use to this process"


@pytest.fixture
def shapes(device: torch.device) -> Shapes:
    """LARGE where the GPU has 60 GB free, TINY elsewhere."""
    large = device.type == "cuda" and torch.cuda.mem_get_info(device)[0] > 60e9
    return LARGE if large else TINY


@pytest.fixture
def report(request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> Any:
    """Prints measurements past pytest's capturing, and keeps them for --measured:
    `report(step_seconds=0.1)`."""

    def show(**measured: float) -> None:
        measured = {name: value for name, value in measured.items() if not math.isnan(value)}
        request.config.stash[MEASURED].append({"test": request.node.name, **measured})
        with capsys.disabled():
            print("\n  " + ", ".join(f"{name} {value:.4g}" for name, value in measured.items()))

    return show
