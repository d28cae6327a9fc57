"""Attending over a ragged cache, for decoder layers that leave it to their caller: the drafting step of every head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from speculators.layers.decoder import Attend
from speculators.layers.grouped_attention import MOST_QUERIES, attend_grouped, repeat_mask


def cached_attends(view: Any, mask: Tensor | None, new_tokens: int, layers: int) -> list[Attend]:
    """An `Attend` for each layer, over the cache's `view` of one forward of `new_tokens` per row.

    mask: bool [b, 1, T, S], True = attend; None: causal, over rows of equal length that were empty or add one token.
    """
    causal = mask is None and new_tokens > 1
    repeated: list[Tensor] = []

    def attend(layer: int) -> Callable:
        def inner(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
            k, v = view.update(k, v, layer)
            if not q.shape[2]:  # keys and values were all that is wanted
                return q
            repeat = q.shape[1] // k.shape[1]
            if repeat == 1 or causal or q.shape[2] > MOST_QUERIES:
                return nn.functional.scaled_dot_product_attention(
                    q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=repeat > 1
                )
            if mask is not None and not repeated:
                repeated.append(repeat_mask(mask, repeat))
            return attend_grouped(q, k, v, repeated[0] if repeated else None, scale)

        return inner

    return [attend(layer) for layer in range(layers)]
