"""Attention of a draft head that reads its own predictions: one causal block and a few diagonals.

At step i of an unroll a query of slot t sees the keys of step 0 causally (slots <= t of its own document) and, of
every later step 1..i, only the key of its own slot. Writing that as one mask would take [T, (i+1)·T] scores; here the
block is walked in chunks of queries, the diagonals are one score each, and a chunk's scores are dropped and computed
again in the backward pass. Source of the pattern: training-time test of EAGLE-3 (arXiv 2503.01840).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from speculators.layers.decoder import Attend
from speculators.layers.grouped_attention import MOST_QUERIES, attend_grouped, repeat_mask

SCORES = {"cpu": 1 << 24, "cuda": 1 << 26}  # attention scores that a chunk of queries may have, by kind of device
QUERIES = 256  # of a chunk, where that many fit
KEPT_SCORES = 1 << 25  # of one layer and depth, in numbers: what may wait for the backward pass (128 MiB in float32)


def unrolled_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    diagonals: Sequence[tuple[Tensor, Tensor]],
    slots: Tensor,
    segment_ids: Tensor,
    scale: float,
    chunk: int = QUERIES,
) -> Tensor:
    """query [B, h, M, d] of the slots `slots` [B, M]; key [B, g, T, d], value [B, g, T, v] of depth 0, one per slot.

    diagonals: (key, value) [B, g, M, ·] of the same slots at depths 1..i. `segment_ids` [B, T]: documents of a packed
    row; padding is -1 and attends to itself only. Returns [B, h, M, v].
    """
    (B, h, M), T = query.shape[:3], key.shape[2]
    width = min(M, chunk, chunk_queries(B * h * T, query.device.type))
    whole_row = M == T  # slots in order: later keys are never seen by an earlier chunk
    pieces = []
    for start in range(0, M, width):
        rows = slice(start, min(start + width, M))
        keys = slice(0, rows.stop if whole_row else None)
        arguments = (
            query[:, :, rows],
            key[:, :, keys],
            value[:, :, keys],
            slots[:, rows],
            segment_ids[:, keys],
            segment_ids,
            scale,
            *(t[:, :, rows] for pair in diagonals for t in pair),
        )
        if torch.is_grad_enabled() and recomputes_scores(B, h, M, T):
            pieces.append(checkpoint(_attend, *arguments, use_reentrant=False))
        else:
            pieces.append(_attend(*arguments))
    return torch.cat(pieces, dim=2) if len(pieces) > 1 else pieces[0]


def chunk_queries(scores: int, device: str) -> int:
    """Queries whose scores exist at once, each with `scores` of them, on a device of that kind."""
    return max(16, SCORES.get(device, SCORES["cuda"]) // scores)


def recomputes_scores(rows: int, heads: int, queries: int, keys: int) -> bool:
    """True if the scores of a layer over `rows` rows are recomputed in the backward pass, being too many to keep
    once per depth of an unroll."""
    return rows * heads * queries * keys > KEPT_SCORES


def _attend(
    q: Tensor, k: Tensor, v: Tensor, slots: Tensor, k_segments: Tensor, segment_ids: Tensor, scale: float, *own: Tensor
) -> Tensor:
    """One chunk of c queries over S keys of depth 0, and i own keys each."""
    B, h, c, d = q.shape
    g, S, repeat, width = k.shape[1], k.shape[2], h // k.shape[1], v.shape[-1]
    q = q.reshape(B, g, repeat * c, d)  # query heads of one group share its keys
    places = torch.arange(S, device=q.device)
    q_segments = segment_ids.gather(1, slots)  # [B, c]
    hidden = (
        (q_segments[:, :, None] != k_segments[:, None, :]) | (slots[:, :, None] < places) | (q_segments[:, :, None] < 0)
    )
    hidden &= slots[:, :, None] != places  # [B, c, S]; nobody is left without a key
    scores = (q @ k.transpose(-1, -2)).float().mul_(scale)  # [B, g, h/g·c, S]
    scores = scores.view(B, g, repeat, c, S).masked_fill_(hidden[:, None, None], float("-inf")).view(B, g, -1, S)
    keys, values = own[0::2], own[1::2]
    if not keys:
        return (scores.softmax(-1).to(v.dtype) @ v).reshape(B, h, c, width)
    per_slot = [(q * key.repeat(1, 1, repeat, 1)).float().sum(-1, keepdim=True) * scale for key in keys]
    weights = torch.cat([scores, *per_slot], dim=-1).softmax(-1).to(v.dtype)  # [B, g, h/g·c, S + i]
    out = weights[..., :S] @ v
    for i, value in enumerate(values):
        out = out + weights[..., S + i : S + i + 1] * value.repeat(1, 1, repeat, 1)
    return out.reshape(B, h, c, width)


def cached_attends(view: Any, mask: Tensor | None, new_tokens: int, layers: int) -> list[Attend]:
    """An `Attend` for each layer, over the cache's `view` of one forward of `new_tokens` per row.

    mask: bool [b, 1, T, S], True = attend; None: causal, over rows of equal length that were empty or add one token.
    """
    causal = mask is None and new_tokens > 1
    added: dict[int, Tensor] = {}  # repeat -> the mask as what is added to the scores, which all layers share

    def bias(like: Tensor, repeat: int) -> Tensor | None:
        if mask is None:
            return None
        if repeat not in added:
            whole = torch.where(mask, torch.zeros((), dtype=like.dtype, device=like.device), float("-inf"))
            added[repeat] = repeat_mask(whole, repeat) if repeat > 1 else whole
        return added[repeat]

    def attend(layer: int) -> Callable:
        def inner(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
            k, v = view.update(k, v, layer)
            if not q.shape[2]:  # keys and values were all that is wanted
                return q
            repeat = q.shape[1] // k.shape[1]
            if repeat == 1 or causal or q.shape[2] > MOST_QUERIES:
                if repeat > 1 and mask is not None:  # kernels that take masks know no groups
                    k, v = k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)
                grouped = repeat > 1 and mask is None
                return nn.functional.scaled_dot_product_attention(
                    q, k, v, attn_mask=bias(q, 1), is_causal=causal, scale=scale, enable_gqa=grouped
                )
            return attend_grouped(q, k, v, bias(q, repeat), scale)

        return inner

    return [attend(layer) for layer in range(layers)]
