"""Whether all rows of an engine, at their full length, fit its accelerator. Asked at load: caches
grow as texts do, and what runs out of memory in the middle of a batch says nothing of options."""

from __future__ import annotations

import torch

from draftsmith.inference.engine.engine import Engine
from draftsmith.inference.kv_cache.ragged_cache import RaggedCache
from draftsmith.inference.requests.request import Request
from draftsmith.inference.sampling_params import SamplingParams
from draftsmith.speculators.precision import free_memory


def memory_fault(engine: Engine) -> str | None:
    """What is wrong if the rows do not fit the free memory; None if they fit, and on a CPU. Runs
    two tokens through target and drafter, in caches of one row, for the bytes of a position. While
    no row holds anything."""
    device = engine.target.device
    if device.type != "cuda":
        return None
    caches = [engine.cache]
    if engine.proposer is not None and engine.proposer.cache is not None:
        caches.append(engine.proposer.cache)
    probes = [RaggedCache(1, cache.max_len, device=device) for cache in caches]
    with torch.inference_mode():
        _two_tokens(engine, *probes)
    free_memory()
    needed = sum(
        probe.bytes() // probe.capacity * cache.max_len * cache.max_rows
        for probe, cache in zip(probes, caches, strict=True)
    )
    room = torch.cuda.mem_get_info(device)[0] + sum(cache.bytes() for cache in [*caches, *probes])
    if needed <= room:
        return None
    return (
        f"max_num_seqs={engine.options.max_num_seqs} rows of max_model_len={engine.max_model_len}"
        f" tokens take {needed / 2**30:.1f} GiB of keys and values, and {device} has"
        f" {room / 2**30:.1f} GiB for them; lower max_num_seqs or max_model_len"
    )


def _two_tokens(engine: Engine, cache: RaggedCache, drafters: RaggedCache | None = None) -> None:
    """Prefills two tokens into caches of one row."""
    token_ids = torch.zeros(1, 2).long().to(engine.target.device)
    positions, mask = cache.position_ids(0, 1, 2), cache.mask(0, 1, 2)
    features = engine.target_forward(token_ids, positions, mask, cache.view(0, 1, 2))
    proposer, length = engine.proposer, engine.max_model_len
    if proposer is not None and drafters is not None:
        request = Request("", 0, [0, 0], SamplingParams(), generator=None, max_model_len=length)
        proposer.cache, whole = drafters, proposer.cache
        proposer.reset(0)
        proposer.prefill(0, [request], [2], *features)
        proposer.reset(0)
        proposer.cache = whole
