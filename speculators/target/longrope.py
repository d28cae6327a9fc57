"""LongRoPE with one fixed set of frequencies.

transformers uses the long frequencies for a whole forward if one of its positions is beyond the
original length, so that a long row, or a draft across the boundary, would change every row's
output. Here the longest text that is served decides once, as in vLLM."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


def original_length(config: Any) -> int | None:
    """The length up to which LongRoPE's frequencies are short; None without it."""
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") != "longrope":
        return None
    return rope.get("original_max_position_embeddings") or getattr(
        config, "original_max_position_embeddings", None
    )


def fix_frequencies(decoder: nn.Module, max_length: int) -> None:
    """Fixes the frequencies of `decoder` to those for texts of `max_length` tokens."""
    for module in decoder.modules():
        config = getattr(module, "config", None)
        if isinstance(getattr(module, "rope_type", None), str) and original_length(config):
            device = module.inv_freq.device
            inv_freq, module.attention_scaling = ROPE_INIT_FUNCTIONS["longrope"](
                config, device, seq_len=max_length
            )
            module.register_buffer("inv_freq", inv_freq, persistent=False)
            module.rope_type = "fixed"  # a type that transformers does not update in a forward
