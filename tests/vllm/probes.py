"""What shows vLLM's known faults from inside its process (test_vllm_faults.py). Each takes a job
and answers it."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from serve import make_llm, runner_of, serve

WORKER = Path(__file__).resolve().parents[2] / "inference" / "vllm_bridge" / "worker.py"


def expand_floats(job: dict) -> dict:
    """`values` of requests, handed to each of their drafted tokens, as the sampler hands on
    temperatures."""
    import torch
    from vllm.platforms import current_platform
    from vllm.v1.sample.rejection_sampler import expand_batch_to_tokens

    current_platform.register_triton_kernel_overrides()  # as an engine does that starts
    counts = torch.tensor(job["counts"], dtype=torch.int32).cumsum(0).to(torch.int32)
    return {
        "expanded": [
            expand_batch_to_tokens(torch.tensor(v), counts, counts[-1]).tolist()
            for v in job["values"]
        ]
    }


def normed_keys(job: dict) -> dict:
    """A DFlash drafter's context keys: of every layer the norm's weight, and what all ones
    become."""
    import torch

    llm = make_llm(job)
    model = runner_of(llm).drafter.model.model
    weights = model._k_norm_weights
    normed = model._normalize_context_k(torch.ones(len(weights), 1, 1, weights.shape[1]))
    return {"weights": weights.tolist(), "normed": normed.flatten(1).tolist()}


def engine_beside_numba(job: dict) -> dict:
    """As `serve`, in a process that has numba already."""
    import numba  # noqa: F401

    return serve(job)


@contextmanager
def repaired() -> Iterator[None]:
    """vLLM without the faults that the worker of `evaluate` repairs."""
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model
    from vllm.v1.sample import rejection_sampler

    worker = runpy.run_path(str(WORKER))
    broken = rejection_sampler.expand_batch_to_tokens, DFlashQwen3Model._normalize_context_k
    worker["repair"]()
    try:
        yield
    finally:
        rejection_sampler.expand_batch_to_tokens, DFlashQwen3Model._normalize_context_k = broken


def without_faults(job: dict) -> dict:
    """As `serve`, repaired."""
    with repaired():
        return serve(job)
