"""Attention of draft blocks in training: every block reads the context before its anchor and its
own slots.

Keys are those of the row's context and, for each block, those of its own slots. One mask over all
of them would take [A·Q, T + A·Q] scores, nearly all of the second part masked. On a CPU the context
is left to a fused kernel (fused_attention.py), which sees no slot behind the newest context of a
run of blocks; a block's own slots are a few scores each, and both are merged by their log-sum-exp,
so that no scores are kept. Elsewhere a query has T + Q scores, blocks are walked in chunks, and the
scores of a long row are computed again in the backward pass. Source of the pattern: DFlash (arXiv
2602.06036)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from speculators.layers.attention import chunk_queries, recomputes_scores
from speculators.layers.fused_attention import KERNELS, Kernel, Run, in_window, statistics_dtype
from speculators.precision import on_host

RUN_QUERIES = 256  # of one call of the kernel


@dataclass(frozen=True, eq=False)
class Blocks:
    """Where the blocks of a batch of rows stand, and what their slots may see.

    last_context  [B, A] the newest context slot of each block, the one before its anchor; -1: no
                  context
    places        [B, A, Q] rotary positions of the slots of each block
    context_places, segment_ids [B, T] positions and documents of the row; another document is not
    seen
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
        return replace(
            self, last_context=self.last_context[:, blocks], places=self.places[:, blocks]
        )

    def sees_context(self) -> Tensor:
        """bool [B, A, Q or 1, T]."""
        slots = torch.arange(self.segment_ids.shape[1], device=self.segment_ids.device)
        documents = self.segment_ids.gather(1, self.last_context.clamp_min(0))  # [B, A]
        seen = (slots <= self.last_context[..., None]) & (
            self.segment_ids[:, None] == documents[..., None]
        )
        if self.window is None:
            return seen[:, :, None]
        near = in_window(
            self.places, self.context_places[:, None, None], self.window
        )  # [B, A, Q, T]
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

    def hidden(self, queries: slice, keys: slice, rows: slice = slice(None)) -> Tensor:
        """bool [B, c, S], True where a slot of the blocks [A·Q] does not see one of the context."""
        Q = self.places.shape[-1]
        blocks = slice(queries.start // Q, queries.stop // Q)
        last, segment_ids = self.last_context[rows, blocks, None], self.segment_ids[rows]
        slots = torch.arange(segment_ids.shape[1], device=last.device)[keys]
        own = segment_ids.gather(1, last[..., 0].clamp_min(0))[..., None]
        hidden = ((slots > last) | (own != segment_ids[:, None, keys]))[
            :, :, None
        ]  # [B, c / Q, 1, S]
        if self.window is not None:
            hidden = hidden | ~in_window(
                self.places[rows, blocks], self.context_places[rows, None, None, keys], self.window
            )
        return hidden.expand(-1, -1, Q, -1).flatten(1, 2)

    @cached_property
    def alone(self) -> Tensor:
        """bool [B, 1, A·Q], True for slots that see no context."""
        hidden = (self.last_context < 0)[..., None].expand(self.places.shape)
        if self.window is not None:
            newest = self.context_places.gather(1, self.last_context.clamp_min(0))[..., None]
            hidden = hidden | (self.places - newest >= self.window)
        return hidden.flatten(1)[:, None]

    @cached_property
    def runs(self) -> list[Run]:
        """All blocks with a context, RUN_QUERIES slots of one document at most."""
        found, Q = [], self.places.shape[-1]
        most = max(1, RUN_QUERIES // Q)
        last, segment_ids, places, of_context = (
            on_host(x)
            for x in (self.last_context, self.segment_ids, self.places[..., 0], self.context_places)
        )
        for row, newest in enumerate(last.tolist()):
            documents = segment_ids[row, last[row].clamp_min(0)].tolist()
            start = 0
            for stop in range(1, len(newest) + 1):
                goes_on = (
                    stop < len(newest) and newest[stop] >= 0 and documents[stop] == documents[start]
                )
                if goes_on and stop - start < most:
                    continue
                if newest[start] >= 0:
                    seen = segment_ids[row] == documents[start]
                    if self.window is not None:
                        seen &= in_window(
                            places[row, start:stop].min(), of_context[row], self.window
                        )
                    oldest = min(int(seen.int().argmax()), min(newest[start:stop]))
                    keys = slice(oldest, max(newest[start:stop]) + 1)
                    found.append(Run(row, slice(start * Q, stop * Q), keys, False))
                start = stop
        return found


def block_attention(
    query: Tensor,
    own: tuple[Tensor, Tensor],
    context: tuple[Tensor, Tensor],
    blocks: Blocks,
    scale: float,
) -> Tensor:
    """query [B, h, A·Q, d] -> [B, h, A·Q, v]. Its gradient cannot be differentiated again.

    own: key and value of the blocks' slots [B, g, A·Q, ·]; context: those of the row's slots [B, g,
    T, ·]."""
    kernel, one_width = KERNELS.get(query.device.type), query.shape[-1] == context[1].shape[-1]
    if kernel is not None and kernel.in_runs and one_width:
        return _Merged.apply(
            kernel, blocks, scale, *(x.to(own[1].dtype) for x in (query, *own, *context))
        )
    return explicit_block_attention(query, own, context, blocks, scale)


class _Merged(torch.autograd.Function):
    """Context and own slots in one softmax."""

    @staticmethod
    def forward(
        ctx: Any,
        kernel: Kernel,
        blocks: Blocks,
        scale: float,
        q: Tensor,
        own_k: Tensor,
        own_v: Tensor,
        k: Tensor,
        v: Tensor,
    ) -> Tensor:
        exact, groups = statistics_dtype(q.dtype), k.shape[1]
        with torch.autocast(q.device.type, enabled=False):
            out, lse = kernel.forward(q, k, v, blocks, scale)
            out.masked_fill_(blocks.alone[..., None], 0)
            lse.masked_fill_(blocks.alone, float("-inf"))
            query, key, value = (_per_block(x, groups, blocks).to(exact) for x in (q, own_k, own_v))
            weights = _inside(query, key, blocks, scale)
            whole = torch.logaddexp(
                lse, _per_query(weights.logsumexp(-1, keepdim=True), blocks)[..., 0]
            )  # [B, h, A·Q]
            weights.sub_(_per_block(whole[..., None], groups, blocks)).exp_()
            seen = _per_query(weights @ value, blocks)
            out = seen.addcmul_(out.to(exact), (lse - whole).exp_()[..., None]).to(q.dtype)
        ctx.save_for_backward(q, own_k, own_v, k, v, out, whole)
        ctx.kernel, ctx.blocks, ctx.scale = kernel, blocks, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (q, own_k, own_v, k, v, out, lse), blocks = ctx.saved_tensors, ctx.blocks
        exact, groups = statistics_dtype(q.dtype), k.shape[1]
        dq, dk, dv = ctx.kernel.backward(grad, q, k, v, out, lse, blocks, ctx.scale)
        dq.masked_fill_(blocks.alone[..., None], 0)
        delta, tensors = (grad.to(exact) * out).sum(-1, keepdim=True), (q, own_k, own_v, grad)
        query, key, value, grad = (_per_block(x, groups, blocks).to(exact) for x in tensors)
        lse, delta = (_per_block(x, groups, blocks) for x in (lse[..., None], delta))
        weights = _inside(query, key, blocks, ctx.scale).sub_(lse).exp_()  # [B, g, A, r·Q, Q]
        scores = (grad @ value.mT).sub_(delta).mul_(weights).mul_(ctx.scale)
        own = (
            (x.mT @ each).flatten(2, 3).to(q.dtype)
            for x, each in ((scores, query), (weights, grad))
        )
        return None, None, None, dq.add_(_per_query(scores @ key, blocks)), *own, dk, dv


def _per_block(x: Tensor, groups: int, blocks: Blocks) -> Tensor:
    """[B, g·r, A·Q, n] -> [B, g, A, r·Q, n]: the query heads of a group share the keys of a
    block."""
    A, Q = blocks.places.shape[1:]
    return x.unflatten(1, (groups, -1)).unflatten(3, (A, Q)).transpose(2, 3).flatten(3, 4)


def _per_query(x: Tensor, blocks: Blocks) -> Tensor:
    """The reverse."""
    return x.unflatten(3, (-1, blocks.places.shape[-1])).transpose(2, 3).flatten(3, 4).flatten(1, 2)


def _inside(query: Tensor, key: Tensor, blocks: Blocks, scale: float) -> Tensor:
    """Scores of the blocks' slots among each other [B, g, A, r·Q, Q], of `_per_block`'s query and
    key."""
    scores, Q = query @ key.mT, key.shape[-2]
    scores.mul_(scale).unflatten(3, (-1, Q)).masked_fill_(~blocks.sees_block(), float("-inf"))
    return scores


def explicit_block_attention(
    query: Tensor,
    own: tuple[Tensor, Tensor],
    context: tuple[Tensor, Tensor],
    blocks: Blocks,
    scale: float,
    chunk: int | None = None,
) -> Tensor:
    """The same by scores, of `chunk` blocks at a time; None chooses by their size."""
    (B, h, N, _), (A, Q), T = query.shape, blocks.places.shape[1:], context[0].shape[2]
    chunk = chunk or max(1, chunk_queries(B * h * T, query.device.type) // Q)
    recompute = torch.is_grad_enabled() and recomputes_scores(B, h, N, T)
    pieces = []
    for start in range(0, A, chunk):
        part = slice(start, min(start + chunk, A))
        slots = slice(part.start * Q, part.stop * Q)
        arguments = (
            query[:, :, slots],
            own[0][:, :, slots],
            own[1][:, :, slots],
            *context,
            blocks.part(part),
            scale,
        )
        pieces.append(
            checkpoint(_attend, *arguments, use_reentrant=False)
            if recompute
            else _attend(*arguments)
        )
    return torch.cat(pieces, dim=2) if len(pieces) > 1 else pieces[0]


def _attend(
    q: Tensor,
    key: Tensor,
    value: Tensor,
    context_key: Tensor,
    context_value: Tensor,
    blocks: Blocks,
    scale: float,
) -> Tensor:
    """One chunk of c blocks."""
    B, h, N, d = q.shape
    c, Q = blocks.places.shape[1:]
    g, T = context_key.shape[1:3]
    r = h // g  # query heads that share a key head
    q = q.reshape(B, g, r, c, Q, d)
    minus = float("-inf")
    before = (
        (q.reshape(B, g, -1, d) @ context_key.transpose(-1, -2))
        .float()
        .mul_(scale)
        .view(B, g, r, c, Q, T)
    )
    before = before.masked_fill(~blocks.sees_context()[:, None, None], minus)
    key, value = (x.reshape(B, g, 1, c, Q, x.shape[-1]) for x in (key, value))
    inside = (
        (q @ key.transpose(-1, -2)).float().mul_(scale).masked_fill(~blocks.sees_block(), minus)
    )
    weights = (
        torch.cat([before, inside], dim=-1).softmax(-1).to(value.dtype)
    )  # [B, g, r, c, Q, T + Q]
    out = (weights[..., :T].reshape(B, g, -1, T) @ context_value).view(B, g, r, c, Q, -1) + weights[
        ..., T:
    ] @ value
    return out.reshape(B, h, N, -1)
