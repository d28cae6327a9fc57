"""Attention of draft heads in training: a query reads slots of its row, and keys of its own.

At step i of a chain, a query of slot t sees the keys of step 0 causally (slots <= t of its own
document) and, of every later step 1..i, only the key of its own slot (training-time test of
EAGLE-3, arXiv 2503.01840). In a draft block, a query sees the context before the block's anchor and
the slots of its block (DFlash, arXiv 2602.06036). Own keys are a few scores of each query; the
context's are computed for some queries at a time, over the slots that any of them sees, and again
in the backward pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from draftsmith.speculators.layers import flex_attention
from draftsmith.speculators.layers.queries import Queries

QUERIES = 128  # of a chunk at most
# Scores that a chunk may have (128 MiB in float32).
SCORES = 1 << 25

HIDDEN = -1e30  # of a score; finite, as a block may see no context at all

Pair = tuple[Tensor, Tensor]  # keys and values


def attention(
    query: Tensor, context: Pair, own: Sequence[Pair], queries: Queries, scale: float
) -> Tensor:
    """query [B, h, M, d] -> [B, h, M, v]. Its gradient cannot be differentiated again.

    On CUDA by the fused kernels of flex_attention.py where these serve, elsewhere row by row.

    context: key [B, g, T, d] and value [B, g, T, v] of the row's slots; own: pairs [B, g, M, ·],
    each of which gives a block of queries as many keys as it has queries."""
    query, key = (x.to(context[1].dtype) for x in (query, context[0]))
    if flex_attention.serves(query, context[1]):
        pairs = [(k.to(query.dtype), v.to(query.dtype)) for k, v in own]
        return flex_attention.merged_attention(query, (key, context[1]), pairs, queries, scale)
    return _Attention.apply(
        queries, scale, query, key, context[1], *(x for pair in own for x in pair)
    )


class _Seen(NamedTuple):
    """Keys and values [B, g, A, K, ·] of A blocks of `width` queries; `bias` [.., width, K] hides
    some."""

    width: int
    key: Tensor
    value: Tensor
    bias: Tensor

    def weights(self, query: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """query [B, h, c, d] -> softmax over these keys [B, g, A, r·width, K] and its log-sum-exp
        [B, h, c, 1], in the dtype of `bias`."""
        scores = (self.per_block(query) @ self.key.mT).to(self.bias.dtype)
        scores = torch.add(self.bias, scores.unflatten(3, (-1, self.width)), alpha=scale)
        weights = scores.softmax(-1)
        # at the largest score a weight never underflows
        lse = scores.amax(-1, keepdim=True) - weights.amax(-1, keepdim=True).log()
        return weights.flatten(3, 4), self.per_query(lse.flatten(3, 4))

    def attend(self, query: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """query [B, h, c, d] -> what it reads [B, h, c, v], and the log-sum-exp."""
        weights, lse = self.weights(query, scale)
        return self.per_query(weights.to(query.dtype) @ self.value), lse

    def gradients(
        self, query: Tensor, scale: float, grad: Tensor, delta: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Those of query, key and value. grad [B, h, c, v] of what `attend` gives; delta [B, h, c,
        1]: its product with what all parts of the softmax give."""
        weights, grads = self.weights(query, scale)[0], self.per_block(grad.to(query.dtype))
        scores = (grads @ self.value.mT).to(weights.dtype).sub_(self.per_block(delta))
        scores = scores.mul_(weights).to(query.dtype)
        of_key = (scores.mT @ self.per_block(query)).mul_(scale)
        of_query = self.per_query(scores @ self.key).mul_(scale)
        return of_query, of_key, weights.to(query.dtype).mT @ grads

    def per_block(self, x: Tensor) -> Tensor:
        """[B, g·r, A·Q, n] -> [B, g, A, r·Q, n]: the query heads of a group share its keys."""
        x = x.unflatten(1, (self.key.shape[1], -1)).unflatten(3, (-1, self.width))
        return x.transpose(2, 3).flatten(3, 4)

    def per_query(self, x: Tensor) -> Tensor:
        """The reverse."""
        return x.unflatten(3, (-1, self.width)).transpose(2, 3).flatten(3, 4).flatten(1, 2)


class _Attention(torch.autograd.Function):
    """Context and own keys, two parts of one softmax. Kept is the share that each has of it; the
    backward pass makes the weights again."""

    @staticmethod
    def forward(
        ctx: Any,
        queries: Queries,
        scale: float,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *own: Tensor,
    ) -> Tensor:
        B, h, M, _ = query.shape
        out = query.new_empty(B, M, h, value.shape[-1]).transpose(1, 2)
        lse = query.new_empty(B, h, M, 1, dtype=_exact(query))
        for at, _, seen in _context(queries, query, key, value):
            out[at], lse[at] = seen.attend(query[at], scale)
        share = None
        if own:
            mine, lse_of_own = _of_blocks(queries, own).attend(query, scale)
            share = (lse - lse_of_own).sigmoid_()
            out = (share * out + (1 - share) * mine).to(query.dtype)
        ctx.save_for_backward(out, share, query, key, value, *own)
        ctx.queries, ctx.scale = queries, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (out, share, query, key, value, *own), scale = ctx.saved_tensors, ctx.scale
        whole = grad.to(_exact(query))
        delta = (whole * out).sum(-1, keepdim=True)
        of_own: list[Tensor] = []
        of_query = torch.zeros_like(query)
        of_key, of_value = (torch.zeros_like(x, dtype=whole.dtype) for x in (key, value))
        if own:
            rest = 1 - share
            blocks = _of_blocks(ctx.queries, own)
            of_query, *pair = blocks.gradients(query, scale, rest * whole, rest * delta)
            parts = (x.split(ctx.queries.width, dim=3) for x in pair)
            of_own = [x.flatten(2, 3) for pair in zip(*parts) for x in pair]
            whole, delta = share * whole, share * delta
        for at, keys, seen in _context(ctx.queries, query, key, value):
            a, b, c = seen.gradients(query[at], scale, whole[at], delta[at])
            of_query[at] += a
            of_key[at[0], :, keys] += b[:, :, 0]
            of_value[at[0], :, keys] += c[:, :, 0]
        return None, None, of_query, of_key.to(key.dtype), of_value.to(value.dtype), *of_own


def _context(
    queries: Queries, query: Tensor, key: Tensor, value: Tensor
) -> Iterator[tuple[tuple[slice, ...], slice, _Seen]]:
    """Some queries of one row at a time: (where they are [B, h, M], the slots that any of them
    sees, these as keys of one block)."""
    (B, h, M, _), Q = query.shape, queries.width
    most = min(QUERIES, max(16, SCORES // (h * key.shape[2])))
    for row, start in product(range(B), range(0, M, max(1, most // Q) * Q)):
        part = slice(start, min(start + max(1, most // Q) * Q, M))
        keys = queries.span(row, part)
        at = (slice(row, row + 1), slice(None), part)
        of_keys = (x[row, None, :, None, keys] for x in (key, value))
        bias = _bias(queries.hidden(row, part, keys), query)
        yield at, keys, _Seen(part.stop - part.start, *of_keys, bias)


def _of_blocks(queries: Queries, own: Sequence[Tensor]) -> _Seen:
    """The own keys of all blocks."""
    Q = queries.width
    pairs = (torch.cat([x.unflatten(2, (-1, Q)) for x in own[i::2]], dim=3) for i in (0, 1))
    return _Seen(Q, *pairs, _bias(queries.own_hidden, own[0]))


def _bias(hidden: Tensor, like: Tensor) -> Tensor:
    return torch.zeros_like(hidden, dtype=_exact(like)).masked_fill_(hidden, HIDDEN)


def _exact(like: Tensor) -> torch.dtype:
    return torch.promote_types(like.dtype, torch.float32)
