"""What shows vLLM's known faults from inside its process (test_vllm_faults.py). Each takes a job and answers it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from serve import make_llm, runner_of, serve


def expand_floats(job: dict) -> dict:
    """`values` of requests, handed to each of their drafted tokens, as the sampler hands on temperatures."""
    import torch
    from vllm.platforms import current_platform
    from vllm.v1.sample.rejection_sampler import expand_batch_to_tokens

    current_platform.register_triton_kernel_overrides()  # as an engine does that starts
    counts = torch.tensor(job["counts"], dtype=torch.int32).cumsum(0).to(torch.int32)
    return {"expanded": [expand_batch_to_tokens(torch.tensor(v), counts, counts[-1]).tolist() for v in job["values"]]}


def normed_keys(job: dict) -> dict:
    """A DFlash drafter's context keys: of every layer the norm's weight, and what all ones become."""
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
def temperatures_expanded() -> Iterator[None]:
    """Drafts are verified at the temperature and top-p of their request, which fault 1 prevents."""
    from vllm.v1.sample import rejection_sampler

    broken = rejection_sampler.expand_batch_to_tokens
    rejection_sampler.expand_batch_to_tokens = _expand
    try:
        yield
    finally:
        rejection_sampler.expand_batch_to_tokens = broken


def sampled(job: dict) -> dict:
    """As `serve`, without fault 1."""
    with temperatures_expanded():
        return serve(job)


def by_rule(job: dict) -> dict:
    """Texts by `rejection_sample_method`, without fault 1."""
    config = job["speculative_config"]
    jobs = {r: job | {"speculative_config": config | {"rejection_sample_method": r}} for r in ("standard", "block")}
    return {rule: sampled(asked)["token_ids"] for rule, asked in jobs.items()}


def _expand(x, cu_num_tokens, num_tokens, replace_from=0, replace_to=0):
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    return x.masked_fill(x == replace_from, replace_to).repeat_interleave(counts.long())
