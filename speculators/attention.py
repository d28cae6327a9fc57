"""Attention of a draft head that reads its own predictions: one causal block and a few diagonals.

At step i of an unroll a query of slot t sees the keys of step 0 causally (slots <= t of its own document) and, of
every later step 1..i, only the key of its own slot. Writing that as one mask would take [T, (i+1)·T] scores; here the
block is walked in chunks of queries, the diagonals are one score each, and a chunk's scores are dropped and computed
again in the backward pass. Source of the pattern: training-time test of EAGLE-3 (arXiv 2503.01840).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

RECOMPUTE_FROM = 1024  # queries; shorter rows keep their scores for the backward pass


def unrolled_attention(
    query: Tensor, key: Tensor, value: Tensor, diagonals: Sequence[tuple[Tensor, Tensor]], segment_ids: Tensor,
    scale: float, chunk: int = 256,
) -> Tensor:
    """query [B, h, T, d]; key, value [B, g, T, d] of step 0; diagonals: (key, value) [B, g, T, d] of steps 1..i.

    `segment_ids` [B, T]: documents of a packed row; padding is -1 and attends to itself only. Returns [B, h, T, d].
    """
    T = query.shape[2]
    width = chunk if T > chunk else T
    pieces = []
    for start in range(0, T, width):
        stop = min(start + width, T)
        rows = slice(start, stop)
        arguments = (
            query[:, :, rows], key[:, :, :stop], value[:, :, :stop], segment_ids[:, rows], segment_ids[:, :stop], start,
            scale, *(t[:, :, rows] for pair in diagonals for t in pair),
        )
        if torch.is_grad_enabled() and T > RECOMPUTE_FROM:
            pieces.append(checkpoint(_attend, *arguments, use_reentrant=False))
        else:
            pieces.append(_attend(*arguments))
    return torch.cat(pieces, dim=2) if len(pieces) > 1 else pieces[0]


def _attend(q: Tensor, k: Tensor, v: Tensor, q_segments: Tensor, k_segments: Tensor, start: int, scale: float, *own: Tensor):
    """One chunk of c queries from slot `start` over S = start + c keys, and i own keys each."""
    B, h, c, d = q.shape
    g, S = k.shape[1], k.shape[2]
    q = q.reshape(B, g, (h // g) * c, d)  # query heads of one group share its keys
    slots = torch.arange(start, start + c, device=q.device)
    visible = (q_segments[:, :, None] == k_segments[:, None, :]) & (slots[:, None] >= torch.arange(S, device=q.device))
    visible &= q_segments[:, :, None] >= 0
    visible |= slots[:, None] == torch.arange(S, device=q.device)  # [B, c, S]; nobody is left without a key
    scores = (q @ k.transpose(-1, -2)).float() * scale  # [B, g, h/g·c, S]
    bias = torch.zeros(B, 1, 1, c, S, device=q.device).masked_fill_(~visible[:, None, None], float("-inf"))
    scores = (scores.view(B, g, h // g, c, S) + bias).view(B, g, -1, S)
    keys, values = own[0::2], own[1::2]
    if not keys:
        return (scores.softmax(-1).to(v.dtype) @ v).reshape(B, h, c, d)
    repeat = h // g
    per_slot = [(q * key.repeat(1, 1, repeat, 1)).float().sum(-1, keepdim=True) * scale for key in keys]
    weights = torch.cat([scores, *per_slot], dim=-1).softmax(-1).to(v.dtype)  # [B, g, h/g·c, S + i]
    out = weights[..., :S] @ v
    for i, value in enumerate(values):
        out = out + weights[..., S + i : S + i + 1] * value.repeat(1, 1, repeat, 1)
    return out.reshape(B, h, c, d)
