"""Attention of draft heads in training: a query reads slots of its row, and keys of its own.

At step i of a chain, a query of slot t sees the keys of step 0 causally (slots <= t of its own
document) and, of every later step 1..i, only the key of its own slot (training-time test of
EAGLE-3, arXiv 2503.01840). In a draft block, a query sees the context before the block's anchor and
the slots of its block (DFlash, arXiv 2602.06036). One mask over all keys would be nearly all
masked: own keys are a few scores of each query, and the context's are computed for some queries at
a time, over the slots that any of them sees. Where they are many they are computed again in the
backward pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftsmith.speculators.layers.checkpointing import kept_or_recomputed
from draftsmith.speculators.layers.queries import Queries

QUERIES = 256  # of a chunk at most
# Scores that a chunk may have, and that may wait for the backward pass (128 MiB in float32).
SCORES = 1 << 25

Pair = tuple[Tensor, Tensor]  # keys and values


def attention(
    query: Tensor, context: Pair, own: Sequence[Pair], queries: Queries, scale: float
) -> Tensor:
    """query [B, h, M, d] -> [B, h, M, v].

    context: key [B, g, T, d] and value [B, g, T, v] of the row's slots; own: pairs [B, g, M, ·],
    each of which gives a block of queries as many keys as it has queries."""
    query, key = (x.to(context[1].dtype) for x in (query, context[0]))
    context = (key, context[1])
    (B, h, M, _), T, Q = query.shape, key.shape[2], queries.width
    most = min(QUERIES, max(16, SCORES // (B * h * T)))
    chunk = max(1, most // Q) * Q
    recomputed = B * h * M * T > SCORES
    pieces = []
    for start in range(0, M, chunk):
        part = slice(start, min(start + chunk, M))
        keys = queries.span(part)
        rows = [x[:, :, part] for x in (query, *(x for pair in own for x in pair))]
        of_keys = [x[:, :, keys] for x in context]
        given = (queries, part, keys, scale, *of_keys, *rows)
        pieces.append(kept_or_recomputed(recomputed, _by_scores, *given))
    return torch.cat(pieces, dim=2)


def _by_scores(
    queries: Queries,
    part: slice,
    keys: slice,
    scale: float,
    key: Tensor,
    value: Tensor,
    query: Tensor,
    *own: Tensor,
) -> Tensor:
    """One chunk of c queries over S slots, and K own keys each."""
    B, h, c, _ = query.shape
    g, S, Q = key.shape[1], key.shape[2], queries.width
    exact, shape = torch.promote_types(query.dtype, torch.float32), (B, g, h // g, c)
    seen = query.reshape(B, g, -1, query.shape[-1])  # the query heads of a group share its keys
    scores = (seen @ key.mT).to(exact).mul_(scale).view(*shape, S)
    scores = scores.masked_fill_(queries.hidden(part, keys)[:, None, None], float("-inf"))
    if own:
        inside = (_per_block(query, g, Q) @ _joined(own[0::2], Q).mT).to(exact).mul_(scale)
        if (hidden := queries.own_hidden) is not None:
            inside.unflatten(3, (-1, Q)).masked_fill_(hidden, float("-inf"))
        scores = torch.cat([scores, _per_query(inside, Q).unflatten(1, shape[1:3])], dim=-1)
    weights = scores.softmax(-1).to(value.dtype)  # [B, g, r, c, S + K]
    out = (weights[..., :S].reshape(B, g, -1, S) @ value).view(B, h, c, -1)
    if own:
        of_own = _per_block(weights[..., S:].flatten(1, 2), g, Q) @ _joined(own[1::2], Q)
        out = out + _per_query(of_own, Q)
    return out


def _joined(own: Sequence[Tensor], Q: int) -> Tensor:
    """n tensors [B, g, A·Q, d] -> what each block reads of them [B, g, A, n·Q, d]."""
    return torch.cat([x.unflatten(2, (-1, Q)) for x in own], dim=3)


def _per_block(x: Tensor, groups: int, Q: int) -> Tensor:
    """[B, g·r, A·Q, n] -> [B, g, A, r·Q, n]: the query heads of a group share the keys of a
    block."""
    return x.unflatten(1, (groups, -1)).unflatten(3, (-1, Q)).transpose(2, 3).flatten(3, 4)


def _per_query(x: Tensor, Q: int) -> Tensor:
    """The reverse."""
    return x.unflatten(3, (-1, Q)).transpose(2, 3).flatten(3, 4).flatten(1, 2)
