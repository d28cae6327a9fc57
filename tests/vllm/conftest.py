"""Exports in real vLLM: the same tokens, the same drafts, the same counters as in our runtime.

Skipped unless DRAFTSMITH_VLLM_PYTHON names the Python of an environment that has vLLM's CPU build;
`make test-vllm` sets one up (scripts/setup_vllm.py). One process builds the engines of many tests,
one after another."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.inference.metrics import SpecDecodeCounters
from draftsmith.speculators.drafter import Drafter
from draftsmith.speculators.export import export_drafter
from draftsmith.speculators.export.serving_commands import vllm_method
from tests.support.forked import free_port
from tests.support.programs.serve_in_vllm import SETTINGS as ENVIRONMENT
from tests.support.vllm import (  # noqa: F401 (fixtures)
    PROMPTS,
    WRITTEN,
    installed_vllm,
    mark_all,
    own_texts,
    plain_in_vllm,
    same_as_ours,
    servable_model,
    serve,
    vllm_python,
    wait_for,
    with_head,
)


def pytest_collection_modifyitems(items) -> None:
    mark_all(items, Path(__file__).parent)


# A float32 target would be served in another precision by default, and the CPU's compilation takes
# minutes.
SERVER = (
    "--dtype float32 --enforce-eager --max-model-len 128 --max-num-seqs 8 --kv-cache-memory-bytes"
    " 67108864".split()
)


@pytest.fixture(scope="module")
def vllm_server(vllm_python: str, tmp_path_factory):
    """`vllm_server(model, *arguments, **environment)`: the address of a real server of it on
    loopback; stopped after the module."""
    running, root = [], tmp_path_factory.mktemp("servers")

    def start(model: str, *arguments: str, **variables: str) -> str:
        port = free_port()
        command = [vllm_python, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
        command += ["--host", "127.0.0.1", "--port", str(port), *SERVER, *arguments]
        log = root / f"{port}.log"
        with log.open("w") as written:
            environment = os.environ | {**ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
            environment |= variables
            process = subprocess.Popen(
                command, cwd=root, env=environment, stdout=written, stderr=subprocess.STDOUT
            )
        running.append(process)
        wait_for(f"http://127.0.0.1:{port}/health", process, log)
        return f"http://127.0.0.1:{port}"

    yield start
    for process in running:
        process.terminate()
        process.wait(60)


# -------------------------------------------------------------------- the comparison


@pytest.fixture
def same_in_vllm(same_as_ours, tmp_path: Path):
    """`same_in_vllm(model, drafter)`: exports `drafter` and drafts three tokens a round with it
    greedily in vLLM and in our runtime; see `same_as_ours`. `engine`: further options of vLLM's
    LLM."""

    def check(model: Any, drafter: Drafter, engine: Any = None) -> SpecDecodeCounters:
        head = export_drafter(drafter, tmp_path / "head", dtype=torch.float32)
        model.save_pretrained(tmp_path / "target")
        config = vllm_method(drafter.config.family) | {"model": str(head)}
        config["num_speculative_tokens"] = 3
        llm = with_head(model, head, 3)
        faulty = drafter.config.family == "dflash"
        return same_as_ours(tmp_path / "target", config, llm, engine, repaired=faulty)

    return check
