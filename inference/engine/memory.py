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
    two tokens in caches of one row, for the bytes of a position. Before any request."""
    device, proposer = engine.target.device, engine.proposer
    if device.type != "cuda":
        return None
    caches = [engine.cache]
    if proposer is not None and proposer.cache is not None:
        caches.append(proposer.cache)
    probes = [RaggedCache(1, cache.max_len, device=device) for cache in caches]
    _use(engine, probes)
    params, length = SamplingParams(temperature=0, max_tokens=1), engine.max_model_len
    engine.add(Request("", 0, [0, 0], params, generator=None, max_model_len=length))
    engine.step()
    _use(engine, caches)
    needed = sum(
        probe.bytes() // probe.capacity * cache.max_len * cache.max_rows
        for probe, cache in zip(probes, caches, strict=True)
    )
    del probes
    free_memory()
    room = torch.cuda.mem_get_info(device)[0] + sum(cache.bytes() for cache in caches)
    if needed <= room:
        return None
    return (
        f"max_num_seqs={engine.options.max_num_seqs} rows of max_model_len={engine.max_model_len}"
        f" tokens take {needed / 2**30:.1f} GiB of keys and values, and {device} has"
        f" {room / 2**30:.1f} GiB for them; lower max_num_seqs or max_model_len"
    )


def _use(engine: Engine, caches: list[RaggedCache]) -> None:
    engine.cache = caches[0]
    if engine.proposer is not None and len(caches) == 2:
        engine.proposer.cache = caches[1]
