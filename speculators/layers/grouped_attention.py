"""Attention of new tokens over a cache, for decoding: of targets and of heads.

Under a mask, transformers' sdpa repeats keys and values for every query head, which costs several
times the attention itself: of a few tokens on a CPU, of any number on a GPU. Here the query heads
of a group become further query positions. All other cases go to sdpa."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from draftsmith.speculators.layers.decoder import Attend

NAME = "draftsmith_grouped"
MOST_QUERIES = 16  # tokens on a CPU; above, repeating keys and values is cheap in comparison
# arguments without effect on the result
PLAIN = {"is_causal", "position_ids", "cache_position", "use_cache", "sliding_window"}
PLAIN |= {"output_attentions"}


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **others,
) -> tuple[Tensor, None]:
    """query [B, h, T, d], key, value [B, g, S, d], additive mask [1, 1, T, S] -> [B, T, h, d]."""
    h = query.shape[1]
    T = query.shape[2]
    groups = key.shape[1]
    changing = {name for name, value in others.items() if value is not None} - PLAIN
    whole = T == 1 if attention_mask is None else attention_mask.shape[1:2] == (1,)
    if not shares_keys(T, query.device) or groups == h or not whole or dropout or changing:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **others
        )
    mask = None
    if attention_mask is not None:
        mask = repeat_mask(attention_mask[..., : key.shape[2]], h // groups)
    return attend_grouped(query, key, value, mask, scaling).transpose(1, 2).contiguous(), None


def attend_grouped(
    query: Tensor, key: Tensor, value: Tensor, repeated_mask: Tensor | None, scale: float | None
) -> Tensor:
    """query [B, h, T, d], key, value [B, g, S, d], `repeat_mask`'s mask or None -> [B, h, T, d]."""
    B, h, T, d = query.shape
    side_by_side = query.reshape(B, key.shape[1], h // key.shape[1] * T, d)
    attend = nn.functional.scaled_dot_product_attention
    return attend(side_by_side, key, value, repeated_mask, scale=scale).reshape(B, h, T, d)


def repeat_mask(mask: Tensor, repeat: int) -> Tensor:
    """[B, 1, T, S] -> [B, 1, r·T, S]."""
    return mask.repeat(1, 1, repeat, 1)


def cached_attends(
    view: Any, mask: Tensor | None, new_tokens: int, layers: int, first: int = 0
) -> list[Attend]:
    """An `Attend` for each layer, over the cache's `view` of one forward of `new_tokens` a row; no
    key before `first`.

    mask: bool [b, 1, T, S], True = attend; None: causal, over rows of equal length that were empty
    or add one token."""
    causal = mask is None and new_tokens > 1
    # repeat -> the mask as what is added to the scores, which all layers share
    added: dict[int, Tensor] = {}

    def bias(like: Tensor, repeat: int) -> Tensor | None:
        if mask is None:
            return None
        if repeat not in added:
            whole = torch.zeros(mask.shape, dtype=like.dtype, device=like.device)
            whole.masked_fill_(~mask, float("-inf"))
            added[repeat] = repeat_mask(whole, repeat) if repeat > 1 else whole
        return added[repeat]

    def attend(layer: int) -> Callable:
        def inner(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
            k, v = view.update(k, v, layer)
            if not q.shape[2]:  # keys and values were all that is needed
                return q
            if first:
                k = k[:, :, first:]
                v = v[:, :, first:]
            repeat = q.shape[1] // k.shape[1]
            if repeat > 1 and not causal and shares_keys(q.shape[2], q.device):
                return attend_grouped(q, k, v, bias(q, repeat), scale)
            grouped = repeat > 1 and mask is None
            if repeat > 1 and not grouped:  # kernels that take masks know no groups
                k = k.repeat_interleave(repeat, dim=1)
                v = v.repeat_interleave(repeat, dim=1)
            return nn.functional.scaled_dot_product_attention(
                q, k, v, attn_mask=bias(q, 1), is_causal=causal, scale=scale, enable_gqa=grouped
            )

        return inner

    return [attend(layer) for layer in range(layers)]


@contextmanager
def decoding(config: PretrainedConfig, enabled: bool) -> Iterator[None]:
    """Inside this context, models of `config` attend by `grouped_attention`, if `enabled`."""
    before = config._attn_implementation
    if not enabled or before != "sdpa":
        yield
        return
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = before


def shares_keys(queries: int, device: torch.device) -> bool:
    """True if so many new tokens are better attended to without repeating keys and values."""
    return queries <= MOST_QUERIES or device.type == "cuda"


AttentionInterface.register(NAME, grouped_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
