"""Whether all rows of an engine, at their full length, fit its accelerator. Asked at load: caches
grow as texts do, and what runs out of memory in the middle of a batch says nothing of options."""

from __future__ import annotations

import torch

from draftsmith.inference.engine.engine import Engine
from draftsmith.speculators.precision import free_memory


def memory_fault(engine: Engine) -> str | None:
    """What is wrong if the rows do not fit the free memory; None if they fit, and on a CPU. Before
    any request, while no row holds any."""
    device, rows = engine.target.device, engine.options.max_num_seqs
    if device.type != "cuda":
        return None
    bytes_per_row = engine.runner.bytes_per_row()
    if engine.proposer is not None:
        bytes_per_row += engine.proposer.bytes_per_row()
    free_memory()
    needed = rows * bytes_per_row
    room = torch.cuda.mem_get_info(device)[0]
    if needed <= room:
        return None
    return (
        f"max_num_seqs={rows} rows of max_model_len={engine.max_model_len}"
        f" tokens take {needed / 2**30:.1f} GiB of keys and values, and {device} has"
        f" {room / 2**30:.1f} GiB for them; lower max_num_seqs or max_model_len"
    )
