"""Exports in real SGLang: the same tokens and the same counts as in our runtime.

Skipped unless DRAFTSMITH_SGLANG_PYTHON names the Python of an environment that has SGLang; `make
test-sglang` sets one up (scripts/setup_sglang.py). SGLang's kernels for CPUs are in no package:
tests/support/programs/sglang_kernels.py stands in for them, and its own code is all the rest."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.inference.metrics import SpecDecodeCounters
from draftsmith.inference.vllm_bridge.vllm_engine import VllmError, Worker
from draftsmith.speculators.drafter import Drafter
from draftsmith.speculators.export import export_drafter
from draftsmith.speculators.export.formats import LAYOUTS
from draftsmith.speculators.export.serving_commands import serving
from tests.support.vllm import (  # noqa: F401 (fixtures)
    PROMPTS,
    WRITTEN,
    mark_all,
    own_texts,
    run_ours,
    servable_model,
    with_head,
)

SERVE = Path(__file__).parents[1] / "support" / "programs" / "serve_in_sglang.py"


def pytest_collection_modifyitems(items) -> None:
    mark_all(items, Path(__file__).parent)


@pytest.fixture(scope="session")
def serve() -> Iterator[Any]:
    """`serve(job)`: the answer of serve_in_sglang.py to a job, in a process that tests share."""
    python = os.environ.get("DRAFTSMITH_SGLANG_PYTHON")
    if not python:
        pytest.skip("DRAFTSMITH_SGLANG_PYTHON names no Python that has SGLang (make test-sglang)")
    running: list[Worker] = []

    def stop() -> None:
        while running:
            running.pop().stop()

    def run(job: dict[str, Any]) -> dict[str, Any]:
        if not running:
            running.append(Worker(python, job, SERVE))
            return running[0].facts
        try:
            return running[0].ask(job)
        except VllmError:
            stop()  # an engine that fails takes its process along
            raise

    yield run
    stop()


@pytest.fixture
def same_in_sglang(serve, tmp_path: Path):
    """`same_in_sglang(model, drafter, tokens)`: exports `drafter` for SGLang and drafts with it
    greedily there, by the flags that are printed for it, and in our runtime: both write the same in
    as many rounds. Returns the counters."""

    def check(model: Any, drafter: Drafter, tokens: int = 3) -> SpecDecodeCounters:
        family = drafter.config.family
        format_ = "sglang" if ("sglang", family) in LAYOUTS else "vllm"
        head = export_drafter(drafter, tmp_path / "head", format=format_, dtype=torch.float32)
        model.save_pretrained(tmp_path / "target")
        how = {"folder": str(head), "config": drafter.config, "format": format_}
        _, command, _ = serving(family, tokens=tokens, **how)
        job = {"model": str(tmp_path / "target"), "prompts": PROMPTS, "max_tokens": WRITTEN}
        theirs = serve(job | {"flags": command.options})
        ours = run_ours(with_head(model, head, tokens), tokens)
        assert theirs["token_ids"] == [text[:WRITTEN] for text in ours.texts]
        assert sum(theirs["rounds"]) == ours.counters.num_drafts
        assert sum(theirs["accepted"]) == ours.counters.num_accepted_tokens
        return ours.counters

    return check
