"""Attention of draft heads in training: a query reads slots of its row, and keys of its own.

At step i of a chain, a query of slot t sees the keys of step 0 causally (slots <= t of its own
document) and, of every later step 1..i, only the key of its own slot (training-time test of
EAGLE-3, arXiv 2503.01840). In a draft block, a query sees the context before the block's anchor and
the slots of its block (DFlash, arXiv 2602.06036). One mask over all keys would be nearly all
masked. On a CPU the context is left to torch's fused kernel, own keys are a few scores each, and
both are merged by their log-sum-exp, so that no tensor of scores exists. Elsewhere the queries are
walked in chunks, whose scores are dropped and computed again in the backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from draftsmith.speculators.layers.checkpointing import kept_or_recomputed
from draftsmith.speculators.layers.queries import Queries, Run

# Attention scores that a chunk of queries may have, by kind of device, and the most queries.
SCORES = {"cpu": 1 << 24, "cuda": 1 << 26}
QUERIES = 512
# Scores of one layer and depth that may wait for the backward pass (128 MiB in float32).
KEPT_SCORES = 1 << 25
SHORT = 256  # queries; below, the CPU's kernel takes half as long in float32 as in bfloat16

Pair = tuple[Tensor, Tensor]  # keys and values
Gradients = tuple[Tensor, Tensor, Tensor]  # of query, key and value
aten = torch.ops.aten


def attention(
    query: Tensor, context: Pair, own: Sequence[Pair], queries: Queries, scale: float
) -> Tensor:
    """query [B, h, M, d] -> [B, h, M, v]. Its gradient cannot be differentiated again.

    context: key [B, g, T, d] and value [B, g, T, v] of the row's slots; own: pairs [B, g, M, ·],
    each of which gives a block of queries as many keys as it has queries."""
    if query.device.type != "cpu":
        return explicit_attention(query, context, own, queries, scale)
    dtype, width = context[1].dtype, context[1].shape[-1]
    most = max(query.shape[-1], width)  # the kernel has one width for keys and values
    given = (x for pair in (context, *own) for x in pair)
    tensors = [_widened(x.to(dtype), most) for x in (query, *given)]
    return _Fused.apply(queries, scale, *tensors)[..., :width]


def explicit_attention(
    query: Tensor, context: Pair, own: Sequence[Pair], queries: Queries, scale: float
) -> Tensor:
    """The same by scores, of some blocks of queries at a time."""
    query, key = (x.to(context[1].dtype) for x in (query, context[0]))
    context = (key, context[1])
    (B, h, M, _), T, Q = query.shape, key.shape[2], queries.width
    most = max(16, SCORES.get(query.device.type, SCORES["cuda"]) // (B * h * T))
    chunk = max(1, min(QUERIES, most) // Q) * Q
    recomputed = B * h * M * T > KEPT_SCORES
    pieces = []
    for start in range(0, M, chunk):
        part = slice(start, min(start + chunk, M))
        keys = queries.span(part)
        rows = [x[:, :, part] for x in (query, *(x for pair in own for x in pair))]
        of_keys = [x[:, :, keys] for x in context]
        given = (queries, part, keys, scale, *of_keys, *rows)
        pieces.append(kept_or_recomputed(recomputed, _by_scores, *given))
    return torch.cat(pieces, dim=2) if len(pieces) > 1 else pieces[0]


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
    exact, shape = statistics_dtype(query.dtype), (B, g, h // g, c)
    seen = query.reshape(B, g, -1, query.shape[-1])  # the query heads of a group share its keys
    scores = (seen @ key.mT).to(exact).mul_(scale).view(*shape, S)
    scores = scores.masked_fill_(queries.hidden(part, keys)[:, None, None], float("-inf"))
    if own:
        inside = _inside(_per_block(query, g, Q), _joined(own[0::2], Q), queries, scale)
        scores = torch.cat([scores, _per_query(inside, Q).unflatten(1, shape[1:3])], dim=-1)
    weights = scores.softmax(-1).to(value.dtype)  # [B, g, r, c, S + K]
    out = (weights[..., :S].reshape(B, g, -1, S) @ value).view(B, h, c, -1)
    if own:
        of_own = _per_block(weights[..., S:].flatten(1, 2), g, Q) @ _joined(own[1::2], Q)
        out = out + _per_query(of_own, Q)
    return out


class _Fused(torch.autograd.Function):
    """Context and own keys in one softmax; all tensors have the same last dimension d.

    The kernel's backward pass reads an output and a log-sum-exp: given those of a softmax over
    further keys too, it returns the gradients of its own keys in that softmax, and those of the
    queries through them (P = exp(S - lse) and δ = rowsum(out · grad) are the whole softmax's)."""

    @staticmethod
    def forward(
        ctx: Any, queries: Queries, scale: float, q: Tensor, k: Tensor, v: Tensor, *own: Tensor
    ) -> Tensor:
        exact, groups, Q = statistics_dtype(q.dtype), k.shape[1], queries.width
        with torch.autocast("cpu", enabled=False):
            out, lse = _kernel_forward(q, k, v, queries, scale)
            if own:
                if queries.alone is not None:
                    out.masked_fill_(queries.alone[..., None], 0)
                    lse.masked_fill_(queries.alone, float("-inf"))
                keys, values = (_joined(own[i::2], Q).to(exact) for i in (0, 1))
                weights = _inside(_per_block(q, groups, Q).to(exact), keys, queries, scale)
                of_own = _per_query(weights.logsumexp(-1, keepdim=True), Q)[..., 0]
                whole = torch.logaddexp(lse, of_own)  # [B, h, M]
                weights.sub_(_per_block(whole[..., None], groups, Q)).exp_()
                seen = _per_query(weights @ values, Q)
                out = seen.addcmul_(out.to(exact), (lse - whole).exp_()[..., None]).to(q.dtype)
                lse = whole
        ctx.save_for_backward(q, k, v, out, lse, *own)
        ctx.queries, ctx.scale = queries, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (q, k, v, out, lse, *own), queries, scale = ctx.saved_tensors, ctx.queries, ctx.scale
        exact, groups, Q = statistics_dtype(q.dtype), k.shape[1], queries.width
        dq, dk, dv = _kernel_backward(grad, q, k, v, out, lse, queries, scale)
        if not own:
            return None, None, dq, dk, dv
        if queries.alone is not None:
            dq.masked_fill_(queries.alone[..., None], 0)
        keys, values = (_joined(own[i::2], Q).to(exact) for i in (0, 1))
        delta = (grad.to(exact) * out).sum(-1, keepdim=True)
        query, grad, lse, delta = (
            _per_block(x, groups, Q).to(exact) for x in (q, grad, lse[..., None], delta)
        )
        weights = _inside(query, keys, queries, scale).sub_(lse).exp_()  # [B, g, A, r·Q, K]
        scores = (grad @ values.mT).sub_(delta).mul_(weights).mul_(scale)
        dq = (dq + _per_query(scores @ keys, Q)).to(q.dtype)
        of_own: list[Tensor] = []
        of_keys, of_values = scores.mT @ query, weights.mT @ grad  # [B, g, A, K, d]
        for pair in zip(of_keys.split(Q, dim=3), of_values.split(Q, dim=3)):
            of_own += [x.flatten(2, 3).to(q.dtype) for x in pair]
        return None, None, dq, dk, dv, *of_own


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


def _inside(query: Tensor, key: Tensor, queries: Queries, scale: float) -> Tensor:
    """Scores of a block's queries and own keys [B, g, A, r·Q, K], of `_per_block`'s query and
    `_joined` keys."""
    scores = (query @ key.mT).to(statistics_dtype(query.dtype)).mul_(scale)
    if (hidden := queries.own_hidden) is not None:
        scores.unflatten(3, (-1, queries.width)).masked_fill_(hidden, float("-inf"))
    return scores


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of a softmax over scores of that dtype, and of sums."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _widened(x: Tensor, width: int) -> Tensor:
    """x [..., n] with zeros up to `width`."""
    return x if x.shape[-1] == width else nn.functional.pad(x, (0, width - x.shape[-1]))


# ------------------------------------------------------------------ the CPU's kernel, run by run


def _kernel_forward(
    q: Tensor, k: Tensor, v: Tensor, queries: Queries, scale: float
) -> tuple[Tensor, Tensor]:
    """Output [B, h, M, d] and log-sum-exp [B, h, M]; not defined for queries in no run."""
    B, h, M, d = q.shape
    out = q.new_empty(B, M, h, d).transpose(1, 2)
    lse = q.new_empty(B, h, M, dtype=statistics_dtype(q.dtype))
    for run in queries.runs:
        tensors, mask = _of_run(run, queries, (q,), (k, v))
        o, l = aten._scaled_dot_product_flash_attention_for_cpu(
            *tensors, 0.0, run.causal, attn_mask=mask, scale=scale
        )
        out[run.row, :, run.queries] = o.flatten(0, 1)
        lse[run.row, :, run.queries] = l.flatten(0, 1)
    return out, lse


def _kernel_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    queries: Queries,
    scale: float,
) -> Gradients:
    dq, exact = torch.empty_like(q), statistics_dtype(q.dtype)
    dk, dv = (x.new_zeros(x.shape, dtype=exact) for x in (k, v))
    for run in queries.runs:
        (g, o, *tensors), mask = _of_run(run, queries, (grad, out, q), (k, v))
        l = lse[run.row, :, run.queries].unflatten(0, tensors[0].shape[:2])
        a, b, c = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            g, *tensors, o, l, 0.0, run.causal, attn_mask=mask, scale=scale
        )
        dq[run.row, :, run.queries] = a.flatten(0, 1)
        dk[run.row, :, run.keys] += b.to(exact).sum(1)
        dv[run.row, :, run.keys] += c.to(exact).sum(1)
    return dq, dk.to(k.dtype), dv.to(v.dtype)


def _of_run(
    run: Run, queries: Queries, per_query: tuple[Tensor, ...], per_key: tuple[Tensor, ...]
) -> tuple[list[Tensor], Tensor | None]:
    """The run's part of tensors [B, h, M, d] and [B, g, T, d], each [g, h/g, ·, d], and its mask.
    Keys and values are repeated for the heads of a group without a copy."""
    groups, given = per_key[0].shape[1], per_key[0].dtype
    repeat = per_query[0].shape[1] // groups
    short = run.queries.stop - run.queries.start < SHORT
    dtype = statistics_dtype(given) if short else given
    rows = [x[run.row, :, run.queries].to(dtype) for x in per_query]
    keys = [x[run.row, :, run.keys].to(dtype) for x in per_key]
    tensors = [x.unflatten(0, (groups, repeat)) for x in rows]
    tensors += [x[:, None].expand(-1, repeat, -1, -1) for x in keys]
    tensors = [x if x.stride(-1) == 1 else x.contiguous() for x in tensors]
    if run.causal:
        return tensors, None
    hidden = queries.hidden(run.queries, run.keys, slice(run.row, run.row + 1))
    mask = torch.zeros_like(hidden, dtype=dtype).masked_fill_(hidden, float("-inf"))
    return tensors, mask[:, None]
