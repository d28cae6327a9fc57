"""Attention of draft blocks in training: every block reads the context before its anchor and its own slots.

Keys are those of the row's context and, for each block, those of its own slots. One mask over all of them would take
[A·Q, T + A·Q] scores, nearly all of the second part masked: here a query has T + Q scores, blocks are walked in
chunks, and the scores of a long row are computed again in the backward pass. Source of the pattern: DFlash (arXiv
2602.06036).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from speculators.layers.attention import chunk_queries, recomputes_scores
from speculators.layers.fused_attention import in_window


@dataclass(frozen=True)
class Blocks:
    """Where the blocks of a batch of rows stand, and what their slots may see.

    last_context  [B, A] the newest context slot of each block, the one before its anchor; -1: no context
    places        [B, A, Q] rotary positions of the slots of each block
    context_places, segment_ids [B, T] positions and documents of the row; another document is not seen
    causal        slot j sees slots 0..j of its block; otherwise all of them
    window        a slot sees those that are `in_window`; None: all
    """

    last_context: Tensor
    places: Tensor
    context_places: Tensor
    segment_ids: Tensor
    causal: bool
    window: int | None

    def part(self, blocks: slice) -> Blocks:
        """The same for some of the blocks."""
        return replace(self, last_context=self.last_context[:, blocks], places=self.places[:, blocks])

    def sees_context(self) -> Tensor:
        """bool [B, A, Q or 1, T]."""
        slots = torch.arange(self.segment_ids.shape[1], device=self.segment_ids.device)
        documents = self.segment_ids.gather(1, self.last_context.clamp_min(0))  # [B, A]
        seen = (slots <= self.last_context[..., None]) & (self.segment_ids[:, None] == documents[..., None])
        if self.window is None:
            return seen[:, :, None]
        near = in_window(self.places, self.context_places[:, None, None], self.window)  # [B, A, Q, T]
        return seen[:, :, None] & near

    def sees_block(self) -> Tensor:
        """bool [Q, Q]."""
        Q = self.places.shape[-1]
        every = torch.ones(Q, Q, dtype=torch.bool, device=self.places.device)
        if self.causal:
            every = every.tril()
        if self.window is not None:
            every &= every.new_ones(Q, Q).triu(1 - self.window)
        return every


def block_attention(
    query: Tensor,
    own: tuple[Tensor, Tensor],
    context: tuple[Tensor, Tensor],
    blocks: Blocks,
    scale: float,
    chunk: int | None = None,
) -> Tensor:
    """query [B, h, A·Q, d] -> [B, h, A·Q, v].

    own: key and value of the blocks' slots [B, g, A·Q, ·]; context: those of the row's slots [B, g, T, ·]. `chunk`:
    blocks whose scores exist at once; None chooses by their size.
    """
    (B, h, N, _), (A, Q), T = query.shape, blocks.places.shape[1:], context[0].shape[2]
    chunk = chunk or max(1, chunk_queries(B * h * T, query.device.type) // Q)
    recompute = torch.is_grad_enabled() and recomputes_scores(B, h, N, T)
    pieces = []
    for start in range(0, A, chunk):
        part = slice(start, min(start + chunk, A))
        slots = slice(part.start * Q, part.stop * Q)
        arguments = (query[:, :, slots], own[0][:, :, slots], own[1][:, :, slots], *context, blocks.part(part), scale)
        pieces.append(checkpoint(_attend, *arguments, use_reentrant=False) if recompute else _attend(*arguments))
    return torch.cat(pieces, dim=2) if len(pieces) > 1 else pieces[0]


def _attend(
    q: Tensor, key: Tensor, value: Tensor, context_key: Tensor, context_value: Tensor, blocks: Blocks, scale: float
) -> Tensor:
    """One chunk of c blocks."""
    B, h, N, d = q.shape
    c, Q = blocks.places.shape[1:]
    g, T = context_key.shape[1:3]
    r = h // g  # query heads that share a key head
    q = q.reshape(B, g, r, c, Q, d)
    minus = float("-inf")
    before = (q.reshape(B, g, -1, d) @ context_key.transpose(-1, -2)).float().mul_(scale).view(B, g, r, c, Q, T)
    before = before.masked_fill(~blocks.sees_context()[:, None, None], minus)
    key, value = (x.reshape(B, g, 1, c, Q, x.shape[-1]) for x in (key, value))
    inside = (q @ key.transpose(-1, -2)).float().mul_(scale).masked_fill(~blocks.sees_block(), minus)
    weights = torch.cat([before, inside], dim=-1).softmax(-1).to(value.dtype)  # [B, g, r, c, Q, T + Q]
    out = (weights[..., :T].reshape(B, g, -1, T) @ context_value).view(B, g, r, c, Q, -1) + weights[..., T:] @ value
    return out.reshape(B, h, N, -1)
