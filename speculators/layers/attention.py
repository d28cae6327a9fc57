"""Attention of draft heads in training: a query reads the slots of its row, and keys beside them.

The keys of a query are of two kinds. Those of the context belong to slots of the row, and many
queries read them. Those of its block lie outside the row, and the queries of that block alone read
them. At depth i of a chain, a block is one query of a slot t: it sees the keys of depth 0 causally
(slots <= t of its document: the context) and, of every later depth 1..i, only the key of its own
slot (its block; training-time test of EAGLE-3, arXiv 2503.01840). A draft block is Q queries, which
see the context before the block's anchor and the slots of the block (DFlash, arXiv 2602.06036).

A block's keys are a few scores of each query, all of which are computed at once. The context's are
computed for a chunk of queries at a time, over the slots that any of them sees, and once more in
the backward pass: no [M, T] scores are ever kept."""

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
    query: Tensor, context: Pair, of_blocks: Sequence[Pair], queries: Queries, scale: float
) -> Tensor:
    """query [B, h, M, d] -> [B, h, M, v]. Its gradient cannot be differentiated again.

    On CUDA by the fused kernels of flex_attention.py where these serve, elsewhere row by row.

    context: key [B, g, T, d] and value [B, g, T, v] of the row's slots; of_blocks: pairs [B, g, M,
    ·], each of which gives every block of queries as many keys as it has queries."""
    key, value = context
    query = query.to(value.dtype)
    key = key.to(value.dtype)
    if flex_attention.serves(query, value):
        pairs = [(k.to(query.dtype), v.to(query.dtype)) for k, v in of_blocks]
        return flex_attention.merged_attention(query, (key, value), pairs, queries, scale)
    keys_and_values = [x for pair in of_blocks for x in pair]
    return _Attention.apply(queries, scale, query, key, value, *keys_and_values)


class _Seen(NamedTuple):
    """Keys and values [B, g, A, K, ·] of A blocks of `width` queries; `bias` [.., width, K] hides
    some. One part of a softmax whose other keys it does not know."""

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
        # log sum exp(s) = s - log softmax(s) at any key; at the largest a weight never underflows
        lse = scores.amax(-1, keepdim=True) - weights.amax(-1, keepdim=True).log()
        return weights.flatten(3, 4), self.per_query(lse.flatten(3, 4))

    def attend(self, query: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """query [B, h, c, d] -> what it reads [B, h, c, v], and the log-sum-exp."""
        weights, lse = self.weights(query, scale)
        return self.per_query(weights.to(query.dtype) @ self.value), lse

    def gradients(
        self, query: Tensor, scale: float, grad: Tensor, delta: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Those of query [B, h, c, d], key and value [B, g, A, K, ·], through these keys.

        grad [B, h, c, v] is the gradient of the whole output times this part's share of the
        softmax; delta [B, h, c, 1] its product with the whole output. Both come with the share: see
        `_Attention.backward`."""
        weights, _ = self.weights(query, scale)
        grads = self.per_block(grad.to(query.dtype))
        # dL/ds_j = weight_j (grad · value_j - delta)
        of_scores = (grads @ self.value.mT).to(weights.dtype).sub_(self.per_block(delta))
        of_scores = of_scores.mul_(weights).to(query.dtype)
        of_key = (of_scores.mT @ self.per_block(query)).mul_(scale)
        of_query = self.per_query(of_scores @ self.key).mul_(scale)
        of_value = weights.to(query.dtype).mT @ grads
        return of_query, of_key, of_value

    def per_block(self, x: Tensor) -> Tensor:
        """[B, g·r, A·Q, n] -> [B, g, A, r·Q, n]: the query heads of a group share its keys."""
        x = x.unflatten(1, (self.key.shape[1], -1)).unflatten(3, (-1, self.width))
        return x.transpose(2, 3).flatten(3, 4)

    def per_query(self, x: Tensor) -> Tensor:
        """The reverse."""
        return x.unflatten(3, (-1, self.width)).transpose(2, 3).flatten(3, 4).flatten(1, 2)


class _Attention(torch.autograd.Function):
    """One softmax over two parts, the keys of the context C and those of the blocks O.

    A query has scores s_j = scale · q · k_j over all of its keys, L = log Σ_j exp(s_j), weights
    P_j = exp(s_j - L) and the output Σ_j P_j v_j. A part knows the log-sum-exp of its scores alone,
    L_C, and its weights p_j = exp(s_j - L_C). Since exp(L) = exp(L_C) + exp(L_O),

        P_j = share · p_j,   share = exp(L_C - L) = sigmoid(L_C - L_O),   for j in C,
        P_j = (1 - share) · p_j                                           for j in O,

    and the output is share · out_C + (1 - share) · out_O.

    Saved for the backward pass: the tensors that came in, the output [B, h, M, v] and the share
    [B, h, M, 1]. No scores and no weights, which would be [B, h, M, T]: they are computed again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        queries: Queries,
        scale: float,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *of_blocks: Tensor,
    ) -> Tensor:
        """See `attention`; of_blocks: key, value, key, value, …"""
        B, h, M, _ = query.shape
        out = query.new_empty(B, M, h, value.shape[-1]).transpose(1, 2)
        lse = query.new_empty(B, h, M, 1, dtype=_exact(query))
        for chunk, _, seen in _context(queries, query, key, value):
            out[chunk], lse[chunk] = seen.attend(query[chunk], scale)
        share = None
        if of_blocks:
            out_of_blocks, lse_of_blocks = _in_blocks(queries, of_blocks).attend(query, scale)
            share = (lse - lse_of_blocks).sigmoid_()
            out = (share * out + (1 - share) * out_of_blocks).to(query.dtype)
        ctx.save_for_backward(out, share, query, key, value, *of_blocks)
        ctx.queries = queries
        ctx.scale = scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of what `forward` takes, from that of its output, `grad` [B, h, M, v].

        For one query, with g = dL/d out and the softmax's own derivative,

            dL/ds_j = P_j (g · v_j - δ),   δ = Σ_i P_i (g · v_i) = g · out,
            dL/dq = scale Σ_j dL/ds_j k_j,   dL/dk_j = scale Σ_q dL/ds_j q,   dL/dv_j = Σ_q P_j g.

        δ is a sum over the keys of both parts, but the whole output holds it: one product of g with
        what was saved. With P_j = share · p_j a part needs its own weights p_j alone:

            dL/ds_j = p_j ((share g) · v_j - share δ),   dL/dv_j = Σ_q p_j (share g),

        which is what `_Seen.gradients` computes of `share g` and `share δ`. So neither part sees
        the other's scores, and the gradient is that of the softmax over both. L_C and L_O get none
        of their own: that the share depends on the scores is in δ."""
        out, share, query, key, value, *of_blocks = ctx.saved_tensors
        scale = ctx.scale
        grad = grad.to(_exact(query))
        delta = (grad * out).sum(-1, keepdim=True)
        if of_blocks:
            rest = 1 - share
            blocks = _in_blocks(ctx.queries, of_blocks)
            of_query, *of_pair = blocks.gradients(query, scale, rest * grad, rest * delta)
            of_blocks = _out_of_blocks(*of_pair, ctx.queries.width)
            grad = share * grad
            delta = share * delta
        else:
            of_query = torch.zeros_like(query)
        of_key = torch.zeros_like(key, dtype=grad.dtype)
        of_value = torch.zeros_like(value, dtype=grad.dtype)
        for chunk, slots, seen in _context(ctx.queries, query, key, value):
            of_seen = seen.gradients(query[chunk], scale, grad[chunk], delta[chunk])
            row = chunk[0]
            of_query[chunk] += of_seen[0]
            of_key[row, :, slots] += of_seen[1][:, :, 0]
            of_value[row, :, slots] += of_seen[2][:, :, 0]
        of_key = of_key.to(key.dtype)
        of_value = of_value.to(value.dtype)
        return None, None, of_query, of_key, of_value, *of_blocks


def _context(
    queries: Queries, query: Tensor, key: Tensor, value: Tensor
) -> Iterator[tuple[tuple[slice, ...], slice, _Seen]]:
    """A chunk of whole blocks of one row at a time: (where its queries are in [B, h, M], the slots
    that any of them sees, these as keys of one block, which the chunk is here)."""
    B, h, M, _ = query.shape
    width = queries.width
    most = min(QUERIES, max(16, SCORES // (h * key.shape[2])))
    size = max(1, most // width) * width
    for row, start in product(range(B), range(0, M, size)):
        part = slice(start, min(start + size, M))
        slots = queries.span(row, part)
        chunk = (slice(row, row + 1), slice(None), part)
        seen = _Seen(
            width=part.stop - part.start,
            key=key[row, None, :, None, slots],
            value=value[row, None, :, None, slots],
            bias=_bias(queries.hidden(row, part, slots), query),
        )
        yield chunk, slots, seen


def _in_blocks(queries: Queries, of_blocks: Sequence[Tensor]) -> _Seen:
    """The keys and values of the blocks: pairs [B, g, M, ·] side by side, [B, g, A, n·Q, ·] of n
    pairs."""
    width = queries.width
    keys = [x.unflatten(2, (-1, width)) for x in of_blocks[0::2]]
    values = [x.unflatten(2, (-1, width)) for x in of_blocks[1::2]]
    bias = _bias(queries.hidden_in_block, of_blocks[0])
    return _Seen(width, torch.cat(keys, dim=3), torch.cat(values, dim=3), bias)


def _out_of_blocks(keys: Tensor, values: Tensor, width: int) -> list[Tensor]:
    """The reverse of `_in_blocks`: [B, g, A, n·Q, ·] twice -> key, value, key, value, … [B, g, M,
    ·]."""
    pairs = zip(keys.split(width, dim=3), values.split(width, dim=3))
    return [x.flatten(2, 3) for pair in pairs for x in pair]


def _bias(hidden: Tensor, like: Tensor) -> Tensor:
    return torch.zeros_like(hidden, dtype=_exact(like)).masked_fill_(hidden, HIDDEN)


def _exact(like: Tensor) -> torch.dtype:
    return torch.promote_types(like.dtype, torch.float32)
