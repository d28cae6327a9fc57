"""LongRoPE with one fixed set of frequencies.

transformers uses the long frequencies for a whole forward if one of its positions is beyond the
original length, so that a long row, or a draft across the boundary, would change every row's
output. Here the longest text that is served decides once, as in vLLM."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from draftsmith.speculators.layers.decoder import RotaryTable


def original_length(config: Any) -> int | None:
    """The length up to which LongRoPE's frequencies are short; None without it."""
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") != "longrope":
        return None
    return rope.get("original_max_position_embeddings") or getattr(
        config, "original_max_position_embeddings", None
    )


def trained_length(config: Any, max_length: int) -> int | None:
    """The length whose frequencies a training on rows of `max_length` tokens has: the original one,
    as it is served by default, or that of longer rows. None without LongRoPE."""
    original = original_length(config)
    return None if original is None else max(original, max_length)


def remark(config: Any, length: int) -> str:
    """How to serve what was trained with the frequencies of texts of `length` tokens."""
    original = original_length(config)
    if length == original:
        return (
            f"LongRoPE: trained with the short frequencies, of texts of up to {original} tokens; an"
            f" engine takes the long ones for any text where its max_model_len is beyond (vLLM's"
            f" default): serve with --max-model-len {original}, or train with a data.max_length"
            " above it"
        )
    return (
        f"LongRoPE: trained with the long frequencies, as data.max_length is beyond {original}"
        " tokens; serve with a max_model_len beyond it, too"
    )


def fix_frequencies(model: nn.Module, max_length: int) -> None:
    """Fixes the frequencies of a target's decoder, or a drafter's, to those for texts of
    `max_length` tokens."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if isinstance(getattr(module, "rope_type", None), str) and original_length(config):
            device = module.inv_freq.device
            inv_freq, module.attention_scaling = ROPE_INIT_FUNCTIONS["longrope"](
                config, device, seq_len=max_length
            )
            module.register_buffer("inv_freq", inv_freq, persistent=False)
            module.rope_type = "fixed"  # a type that transformers does not update in a forward
    for module in model.modules():
        if isinstance(module, RotaryTable):
            module.forget()
