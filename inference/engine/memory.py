"""Whether all rows of an engine, at their full length, fit its accelerator. Asked at load: caches
grow as texts do, and what runs out of memory in the middle of a batch says nothing of options."""

from __future__ import annotations

import torch

from draftsmith.inference.model_runner.model_runner import ModelRunner
from draftsmith.inference.spec_decode.proposers.base import Proposer
from draftsmith.speculators.precision import free_memory


def memory_fault(runner: ModelRunner, proposer: Proposer | None) -> str | None:
    """What is wrong if the rows of an engine do not fit the free memory; None if they fit, and on a
    CPU. Before any request, while no row holds any."""
    device = runner.target.device
    rows = runner.cache.max_rows
    if device.type != "cuda":
        return None
    bytes_per_row = runner.bytes_per_row()
    if proposer is not None:
        bytes_per_row += proposer.bytes_per_row()
    free_memory()
    needed = rows * bytes_per_row
    room = torch.cuda.mem_get_info(device)[0]
    if needed <= room:
        return None
    return (
        f"max_num_seqs={rows} rows of max_model_len={runner.max_len}"
        f" tokens take {needed / 2**30:.1f} GiB of keys and values, and {device} has"
        f" {room / 2**30:.1f} GiB for them; lower max_num_seqs or max_model_len"
    )
