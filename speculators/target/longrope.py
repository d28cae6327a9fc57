"""Rotary embeddings of LongRoPE, kept at one set of frequencies.

transformers takes the long frequencies for a whole forward as soon as one of its positions is beyond the original
length, so that a long row, or a draft across the boundary, would change every row's output. Here the longest text that
is served decides once, as in vLLM. Knows no target, cache or drafter.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


def original_length(config: Any) -> int | None:
    """Positions up to which a model of `config` has its short frequencies; None: it has no LongRoPE."""
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") != "longrope":
        return None
    return rope.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)


def fix_frequencies(decoder: nn.Module, max_length: int) -> None:
    """The frequencies of `decoder` become those of texts of `max_length` tokens, whatever it is called with."""
    for module in decoder.modules():
        config = getattr(module, "config", None)
        if isinstance(getattr(module, "rope_type", None), str) and original_length(config):
            device = module.inv_freq.device
            inv_freq, module.attention_scaling = ROPE_INIT_FUNCTIONS["longrope"](config, device, seq_len=max_length)
            module.register_buffer("inv_freq", inv_freq, persistent=False)
            module.rope_type = "fixed"  # to transformers: one that a forward does not change
