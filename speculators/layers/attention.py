"""Attention of a draft head that reads its own predictions: one causal block and a few diagonals.

At step i of an unroll a query of slot t sees the keys of step 0 causally (slots <= t of its own
document) and, of every later step 1..i, only the key of its own slot. The block is left to a fused
kernel (fused_attention.py), the diagonals are one score each, and both are merged by their
log-sum-exp, so that no tensor of scores exists. Where there is no such kernel, the block is walked
in chunks of queries, whose scores are dropped and computed again in the backward pass. Source of
the pattern: training-time test of EAGLE-3 (arXiv 2503.01840)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from speculators.layers.decoder import Attend
from speculators.layers.fused_attention import (
    KERNELS,
    Kernel,
    PackedQueries,
    over_group,
    statistics_dtype,
)
from speculators.layers.grouped_attention import attend_grouped, repeat_mask, shares_keys

SCORES = {
    "cpu": 1 << 24,
    "cuda": 1 << 26,
}  # attention scores that a chunk of queries may have, by kind of device
QUERIES = 256  # of a chunk, where that many fit
KEPT_SCORES = (
    1 << 25
)  # of one layer and depth, in numbers: what may wait for the backward pass (128 MiB in float32)
Pairs = Sequence[tuple[Tensor, Tensor]]


def unrolled_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    diagonals: Pairs,
    queries: PackedQueries,
    scale: float,
) -> Tensor:
    """query [B, h, M, d] of `queries`; key [B, g, T, d], value [B, g, T, v] of depth 0, one per
    slot.

    diagonals: (key, value) [B, g, M, ·] of the same slots at depths 1..i. Returns [B, h, M, v]. Its
    gradient cannot be differentiated again."""
    kernel, tensors = (
        KERNELS.get(query.device.type),
        (query.to(value.dtype), key.to(value.dtype), value),
    )
    if kernel is None or not kernel.takes(tensors[0], queries):
        return explicit_attention(*tensors, diagonals, queries, scale)
    width = -8 * (
        -max(query.shape[-1], value.shape[-1]) // 8
    )  # kernels have one for all, a multiple of eight
    widened = [_widened(x, width) for pair in (tensors, *diagonals) for x in pair]
    return _Merged.apply(kernel, queries, scale, *widened)[..., : value.shape[-1]]


def _widened(x: Tensor, width: int) -> Tensor:
    """x [..., n] with zeros up to `width`."""
    return x if x.shape[-1] == width else nn.functional.pad(x, (0, width - x.shape[-1]))


class _Merged(torch.autograd.Function):
    """Block and diagonals in one softmax; all tensors have the same last dimension d."""

    @staticmethod
    def forward(
        ctx: Any,
        kernel: Kernel,
        queries: PackedQueries,
        scale: float,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *own: Tensor,
    ) -> Tensor:
        """Weights of the diagonals are kept, one per query head, slot and depth."""
        out, lse = kernel.forward(q, k, v, queries, scale)
        weights = []
        if own:
            dtype, grouped = statistics_dtype(q.dtype), (k.shape[1], q.shape[1] // k.shape[1])
            per_group = q.unflatten(1, grouped).to(dtype)  # [B, g, h/g, M, d]
            scores = [
                (per_group * key[:, :, None]).sum(-1).flatten(1, 2) * scale for key in own[0::2]
            ]  # [B, h, M]
            block, lse = lse, torch.stack([lse, *scores]).logsumexp(0)
            weights = [(score - lse).exp_() for score in scores]
            merged = (out * (block - lse).exp_()[..., None]).unflatten(1, grouped)
            for weight, value in zip(weights, own[1::2]):
                merged.addcmul_(
                    weight.unflatten(1, grouped)[..., None], value[:, :, None].to(dtype)
                )
            out = merged.flatten(1, 2).to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse, *weights, *own)
        ctx.kernel, ctx.queries, ctx.scale = kernel, queries, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, *rest = ctx.saved_tensors
        dq, dk, dv = ctx.kernel.backward(grad, q, k, v, out, lse, ctx.queries, ctx.scale)
        weights, own = rest[: len(rest) // 3], rest[len(rest) // 3 :]
        found: list[Tensor] = []
        if own:
            dtype, grouped = statistics_dtype(q.dtype), (k.shape[1], q.shape[1] // k.shape[1])
            q, total, grad, out = (x.unflatten(1, grouped).to(dtype) for x in (q, dq, grad, out))
            delta = (grad * out).sum(-1, keepdim=True)
            for weight, key, value in zip(weights, own[0::2], own[1::2]):
                key, value = (x[:, :, None].to(dtype) for x in (key, value))
                weight = weight.unflatten(1, grouped)[..., None]
                score = ((grad * value).sum(-1, keepdim=True) - delta).mul_(weight).mul_(ctx.scale)
                total.addcmul_(score, key)
                found += [
                    over_group(score * q, 2).to(k.dtype),
                    over_group(weight * grad, 2).to(v.dtype),
                ]
            dq = total.flatten(1, 2).to(dq.dtype)
        return None, None, None, dq, dk, dv, *found


def explicit_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    diagonals: Pairs,
    queries: PackedQueries,
    scale: float,
    chunk: int = QUERIES,
) -> Tensor:
    """The same by scores, of `chunk` queries at a time."""
    (B, h, M), T = query.shape[:3], key.shape[2]
    width = min(M, chunk, chunk_queries(B * h * T, query.device.type))
    pieces = []
    for start in range(0, M, width):
        rows = slice(start, min(start + width, M))
        keys = slice(0, T)
        if queries.chosen is None:
            keys = slice(
                0 if queries.window is None else max(0, start - queries.window + 1), rows.stop
            )
        arguments: tuple[Any, ...] = (
            query[:, :, rows],
            key[:, :, keys],
            value[:, :, keys],
            queries,
            (rows, keys),
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
    """True if the scores of a layer over `rows` rows are recomputed in the backward pass, being too
    many to keep once per depth of an unroll."""
    return rows * heads * queries * keys > KEPT_SCORES


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    queries: PackedQueries,
    part: tuple[slice, slice],
    scale: float,
    *own: Tensor,
) -> Tensor:
    """One chunk of c queries over S keys of depth 0, and i own keys each. `part`: the queries, and
    the slots."""
    B, h, c, d = q.shape
    g, S, repeat, width = k.shape[1], k.shape[2], h // k.shape[1], v.shape[-1]
    q = q.reshape(B, g, repeat * c, d)  # query heads of one group share its keys
    hidden, dtype = queries.hidden(*part), statistics_dtype(q.dtype)  # [B, c, S]
    scores = (q @ k.transpose(-1, -2)).to(dtype).mul_(scale)  # [B, g, h/g·c, S]
    scores = (
        scores.view(B, g, repeat, c, S)
        .masked_fill_(hidden[:, None, None], float("-inf"))
        .view(B, g, -1, S)
    )
    keys, values = own[0::2], own[1::2]
    if not keys:
        return (scores.softmax(-1).to(v.dtype) @ v).reshape(B, h, c, width)
    per_slot = [
        (q * key.repeat(1, 1, repeat, 1)).to(dtype).sum(-1, keepdim=True) * scale for key in keys
    ]
    weights = torch.cat([scores, *per_slot], dim=-1).softmax(-1).to(v.dtype)  # [B, g, h/g·c, S + i]
    out = weights[..., :S] @ v
    for i, value in enumerate(values):
        out = out + weights[..., S + i : S + i + 1] * value.repeat(1, 1, repeat, 1)
    return out.reshape(B, h, c, width)


def _attend_one(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """One query per key head [B, h, 1, d], in arithmetic that a compiler makes into loops of its
    own: on a CPU a third of the time of sdpa in bfloat16."""
    dtype = statistics_dtype(q.dtype)
    scores = (q.to(dtype) * k.to(dtype)).sum(-1) * scale  # [B, h, S]
    if bias is not None:
        scores = scores + bias[:, :, 0]
    return (scores.softmax(-1)[..., None] * v.to(dtype)).sum(2, keepdim=True).to(v.dtype)


def cached_attends(
    view: Any, mask: Tensor | None, new_tokens: int, layers: int, first: int = 0
) -> list[Attend]:
    """An `Attend` for each layer, over the cache's `view` of one forward of `new_tokens` a row; no
    key before `first`.

    mask: bool [b, 1, T, S], True = attend; None: causal, over rows of equal length that were empty
    or add one token."""
    causal = mask is None and new_tokens > 1
    added: dict[
        int, Tensor
    ] = {}  # repeat -> the mask as what is added to the scores, which all layers share

    def bias(like: Tensor, repeat: int) -> Tensor | None:
        if mask is None:
            return None
        if repeat not in added:
            whole = torch.where(
                mask, torch.zeros((), dtype=like.dtype, device=like.device), float("-inf")
            )
            added[repeat] = repeat_mask(whole, repeat) if repeat > 1 else whole
        return added[repeat]

    def attend(layer: int) -> Callable:
        def inner(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
            k, v = view.update(k, v, layer)
            if not q.shape[2]:  # keys and values were all that is wanted
                return q
            if first:
                k, v = k[:, :, first:], v[:, :, first:]
            repeat = q.shape[1] // k.shape[1]
            if (
                repeat == q.shape[2] == 1
                and q.device.type == "cpu"
                and torch.compiler.is_compiling()
            ):
                return _attend_one(q, k, v, bias(q, 1), scale)
            if repeat == 1 or causal or not shares_keys(q.shape[2], q.device):
                if repeat > 1 and mask is not None:  # kernels that take masks know no groups
                    k, v = k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)
                grouped = repeat > 1 and mask is None
                return nn.functional.scaled_dot_product_attention(
                    q, k, v, attn_mask=bias(q, 1), is_causal=causal, scale=scale, enable_gqa=grouped
                )
            return attend_grouped(q, k, v, bias(q, repeat), scale)

        return inner

    return [attend(layer) for layer in range(layers)]
