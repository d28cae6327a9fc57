"""Attention of draft heads in training on CUDA: fused kernels for all rows at once.

The context is read by torch's flex_attention (https://arxiv.org/abs/2412.05496) under a `mask_mod`
of the queries. The keys of a query's block lie outside the row, and are a second part of the same
softmax: with outputs o, o' and log-sum-exps l, l' of the two parts, the whole is s o + (1 - s) o',
s = sigmoid(l - l'). Both log-sum-exps are differentiable, so that autograd makes the backward
pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    FlexKernelOptions,
    create_block_mask,
    flex_attention,
)

from draftsmith.speculators import kernels
from draftsmith.speculators.layers.queries import Blocks, PackedQueries, Queries

LEAST_WIDTH = 16  # of keys and of values, which the kernels' matrix products ask for
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# One kernel for any number of queries. That for fewer than 128 has no choice to compile with where
# their number is dynamic, and was not made for training.
KERNEL: FlexKernelOptions = {"BACKEND": "TRITON"}

HIDDEN = -1e30  # of a score of a block's keys; finite, so that its gradient is

Pair = tuple[Tensor, Tensor]  # keys and values
# batch row, head, query, slot -> True where the query sees the slot
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
# query, key, value, mask, scale -> output [B, h, M, v] and log-sum-exp [B, h, M]
ContextAttention = Callable[[Tensor, Tensor, Tensor, BlockMask, float], Pair]


def serves(query: Tensor, value: Tensor) -> bool:
    """True if the kernels can attend for such tensors on their device. Logs once per reason why a
    GPU goes without them."""
    if query.device.type != "cuda":
        return False
    reason = why_not(query, value)
    if reason is not None:
        kernels.log_once(
            f"attention runs row by row, without flex_attention, which is slower: {reason}"
        )
    return reason is None


def why_not(query: Tensor, value: Tensor) -> str | None:
    """Why the kernels cannot attend on a GPU; None if they can. query [.., d], value [.., v]."""
    return kernels.why_not("attention", query.device) or unsupported_inputs(query, value)


def unsupported_inputs(query: Tensor, value: Tensor) -> str | None:
    """What the kernels do not support of tensors query [.., d], value [.., v]; None if nothing."""
    if query.dtype not in DTYPES:
        return f"keys are {query.dtype}, and the kernels know float32, bfloat16 and float16"
    width = min(query.shape[-1], value.shape[-1])
    if width < LEAST_WIDTH:
        return f"head_dim is {width}, and the kernels need at least {LEAST_WIDTH}"
    return None


def sees(queries: Queries) -> MaskMod:
    """Which slots of the row each query sees. Every kind of queries sees an interval of slots;
    where it lies is a tensor, so that the kernels are compiled once for all depths and windows."""
    if isinstance(queries, PackedQueries):
        return _sees_in_chains(queries)
    return _sees_in_blocks(queries)


def _sees_in_chains(queries: PackedQueries) -> MaskMod:
    """Of its own document, a query sees the slots up to its own, within the window."""
    last = queries.slots
    first = _first_slots(queries.segment_ids).gather(1, last)
    # one in padding sees its own slot only
    first = torch.where(queries.segment_ids.gather(1, last) < 0, last, first)
    if queries.window is not None:
        first = first.maximum(last - queries.window + 1)

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (first[b, q] <= kv) & (kv <= last[b, q])

    return mask_mod


def _sees_in_blocks(queries: Blocks) -> MaskMod:
    """Of its block's document, a query sees the slots before the anchor, within the window, which
    is one of positions."""
    first = _first_slots(queries.segment_ids).gather(1, queries.last_context.clamp_min(0))
    first = first.repeat_interleave(queries.width, dim=1)
    last = queries.last_context.repeat_interleave(queries.width, dim=1)

    def in_document(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (first[b, q] <= kv) & (kv <= last[b, q])

    if queries.window is None:
        return in_document
    behind = queries.places.flatten(1) - queries.window
    places = queries.context_places

    def in_window(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return in_document(b, h, q, kv) & (behind[b, q] < places[b, kv])

    return in_window


def _first_slots(segment_ids: Tensor) -> Tensor:
    """`queries.first_slots` on the device, without waiting for it."""
    slots = torch.arange(segment_ids.shape[1], device=segment_ids.device).expand_as(segment_ids)
    begins = segment_ids.diff(dim=1, prepend=segment_ids[:, :1]) != 0
    return (slots * begins).cummax(1).values


# Layers and depths with the same queries share their mask, which lives as long as these.
_masks: WeakKeyDictionary[Queries, BlockMask] = WeakKeyDictionary()


def block_mask(queries: Queries) -> BlockMask:
    """The mask of `queries` over the slots of their rows, computed when first asked for."""
    if queries not in _masks:
        B, T = queries.segment_ids.shape
        M = _count(queries)
        device = queries.segment_ids.device
        create = _compiled_mask() if device.type == "cuda" else create_block_mask
        with kernels.of_part("attention"):
            _masks[queries] = create(sees(queries), B, None, M, T, device=device)
    return _masks[queries]


def _count(queries: Queries) -> int:
    """Queries of a row."""
    if isinstance(queries, PackedQueries):
        return queries.slots.shape[1]
    return queries.last_context.shape[1] * queries.width


def attend_context(
    query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scale: float
) -> Pair:
    """query [B, h, M, d], key [B, g, T, d], value [B, g, T, v] -> output [B, h, M, v] and
    log-sum-exp [B, h, M]; 0 and -inf of a query that sees nothing. No backward pass on a CPU."""
    kernel = _compiled_attention() if query.device.type == "cuda" else flex_attention
    with kernels.of_part("attention"):
        out, aux = kernel(
            query,
            key,
            value,
            block_mask=mask,
            scale=scale,
            enable_gqa=True,
            kernel_options=KERNEL,
            return_aux=AuxRequest(lse=True),
        )
    return out, aux.lse


def _compiled_attention() -> Callable:
    return kernels.compiled("attention", flex_attention)


def _compiled_mask() -> Callable:
    """Compiled, the mask is computed without its [B, M, T] values in memory."""
    return kernels.compiled("attention", create_block_mask)


def merged_attention(
    query: Tensor,
    context: Pair,
    of_blocks: Sequence[Pair],
    queries: Queries,
    scale: float,
    attend: ContextAttention = attend_context,
) -> Tensor:
    """`attention.attention`, its arguments of one dtype, by `attend` and autograd."""
    with torch.autocast(query.device.type, enabled=False):
        out, lse = attend(query, *context, block_mask(queries), scale)
        if not of_blocks:
            return out
        out_of_blocks, lse_of_blocks = _attend_in_blocks(query, of_blocks, queries, scale)
        share = (lse - lse_of_blocks).sigmoid()[..., None]
        return (share * out + (1 - share) * out_of_blocks).to(query.dtype)


def _attend_in_blocks(
    query: Tensor, of_blocks: Sequence[Pair], queries: Queries, scale: float
) -> Pair:
    """query [B, h, M, d], pairs [B, g, M, ·] -> output [B, h, M, v] and log-sum-exp [B, h, M] over
    the keys of each query's block, of which all pairs give as many as it has queries."""
    Q = queries.width
    keys = [key.unflatten(2, (-1, Q)) for key, _ in of_blocks]
    values = [value.unflatten(2, (-1, Q)) for _, value in of_blocks]
    key = torch.cat(keys, dim=3)  # [B, g, A, K, d]
    value = torch.cat(values, dim=3)  # [B, g, A, K, v]
    groups = key.shape[1]
    per_block = query.unflatten(1, (groups, -1)).unflatten(3, (-1, Q)).transpose(2, 3)
    scores = per_block.flatten(3, 4) @ key.mT  # [B, g, A, r·Q, K]
    exact = torch.promote_types(query.dtype, torch.float32)
    hidden = queries.hidden_in_block
    bias = torch.zeros_like(hidden, dtype=exact).masked_fill(hidden, HIDDEN)
    scores = torch.add(bias, scores.to(exact).unflatten(3, (-1, Q)), alpha=scale)
    lse = scores.logsumexp(-1)  # [B, g, A, r, Q]
    weights = (scores - lse[..., None]).exp().to(value.dtype)
    out = (weights.flatten(3, 4) @ value).unflatten(3, (-1, Q))  # [B, g, A, r, Q, v]
    return _per_query(out), _per_query(lse)


def _per_query(x: Tensor) -> Tensor:
    """[B, g, A, r, Q, …] -> [B, g·r, A·Q, …]."""
    return x.transpose(2, 3).flatten(3, 4).flatten(1, 2)
