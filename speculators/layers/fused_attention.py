"""Causal attention of packed rows by torch's fused kernels, which keep no scores and return every
query's log-sum-exp.

A kernel knows nothing of packed rows and chosen queries. On a CPU it is called for every run of
queries of one document; on a CUDA device once for all documents, with a query for every slot. Its
backward pass reads an output and a log-sum-exp: given those of a softmax over further keys too, it
returns the gradients of its own keys in that softmax, and those of the queries through them (P =
exp(S - lse) and δ = rowsum(out · grad) are then the whole softmax's)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from speculators.precision import on_device, on_host, to_device


def in_window(places: Tensor, keys: Tensor, window: int) -> Tensor:
    """What a sliding window is, in training and drafting: bool [..., Q, S] of positions `places`
    [..., Q], `keys` [S], True where a key is ahead or less than `window` behind."""
    return places[..., None] - keys < window


Gradients = tuple[Tensor, Tensor, Tensor]  # of query, key and value
aten = torch.ops.aten
MASKED_QUERIES = 256  # of one call with a mask
SHORT = 256  # queries; the CPU's kernel takes half as long in float32 as in bfloat16 below


class Run(NamedTuple):
    """Queries of one document, in their order, and the slots that they see some of. `causal`: the
    queries are those of the key slots."""

    row: int
    queries: slice
    keys: slice
    causal: bool


class InRuns(Protocol):
    """Queries as a kernel with `in_runs` walks them. What it returns of a query that is in no run
    is not defined."""

    @property
    def runs(self) -> list[Run]: ...

    def hidden(self, queries: slice, keys: slice, rows: slice = slice(None)) -> Tensor:
        """bool [B, c, S], True where a query does not see a slot."""
        ...


@dataclass(frozen=True, eq=False)
class PackedQueries:
    """Queries of packed rows. Each sees the slots of its own document up to its own; one of padding
    sees its own only.

    segment_ids  [B, T] documents of the slots; -1: padding
    chosen       [B, M] the slots that have a query; None: every one, in order
    window       a query sees only slots that are `in_window`; None: all
    """

    segment_ids: Tensor
    chosen: Tensor | None = None
    window: int | None = None

    def within(self, window: int | None) -> PackedQueries:
        """The same queries with a window."""
        return self if window is None else replace(self, window=window)

    @cached_property
    def slots(self) -> Tensor:
        """[B, M]."""
        if self.chosen is not None:
            return self.chosen
        slots = torch.arange(self.segment_ids.shape[1]).expand(self.segment_ids.shape)
        return to_device(slots, self.segment_ids.device)

    def hidden(self, queries: slice, keys: slice, rows: slice = slice(None)) -> Tensor:
        """bool [B, c, S], True where a query does not see a slot."""
        slots, segment_ids = self.slots[rows, queries], self.segment_ids[rows]
        own, of_keys = segment_ids.gather(1, slots)[:, :, None], segment_ids[:, None, keys]
        places = torch.arange(segment_ids.shape[1], device=slots.device)[keys]
        far = None if self.window is None else ~in_window(slots, places, self.window)
        slots = slots[:, :, None]
        hidden = (own != of_keys) | (slots < places) | (own < 0)
        return (hidden if far is None else hidden | far) & (
            slots != places
        )  # nobody is left without a key

    @cached_property
    def runs(self) -> list[Run]:
        """All queries. What a run sees in part has at most MASKED_QUERIES queries."""
        found = []
        for row, (segments, slots) in enumerate(
            zip(on_host(self.segment_ids).tolist(), on_host(self.slots).tolist())
        ):
            first: dict[int, int] = {}  # slot of each document
            for slot, segment in enumerate(segments):
                first.setdefault(segment, slot)
            start = 0
            for stop in range(1, len(slots) + 1):
                last, segment = slots[stop - 1], segments[slots[start]]
                if stop < len(slots) and slots[stop] > last and segments[slots[stop]] == segment:
                    continue
                whole = segment >= 0 and slots[start] == first[segment] == last - (stop - 1 - start)
                if whole and (self.window is None or stop - start <= self.window):
                    found.append(
                        Run(row, slice(start, stop), slice(first[segment], last + 1), True)
                    )
                else:
                    for a in range(start, stop, MASKED_QUERIES):
                        b = min(a + MASKED_QUERIES, stop)
                        oldest = first[segment] if segment >= 0 else slots[a]
                        if self.window is not None:
                            oldest = max(oldest, slots[a] - self.window + 1)
                        found.append(Run(row, slice(a, b), slice(oldest, slots[b - 1] + 1), False))
                start = stop
        return found

    @cached_property
    def documents(self) -> Documents | None:
        """Those of all rows; None: one is interrupted by another, or by padding."""
        padding: list[int] = []
        starts, longest = [0], 1
        for segments in on_host(self.segment_ids).tolist():
            seen: set[int] = set()
            for segment, slots in groupby(segments):
                length = sum(1 for _ in slots)
                if segment in seen and segment >= 0:
                    return None
                seen.add(segment)
                if segment < 0:
                    padding += range(starts[-1], starts[-1] + length)
                starts.append(starts[-1] + length)
                longest = max(longest, length)
        device = self.segment_ids.device
        offsets = on_device(starts, device, torch.int32)
        return Documents(offsets, longest, on_device(padding, device) if padding else None)


class Documents(NamedTuple):
    """Documents of rows that are laid one behind the other [B·T]. offsets [n + 1]: their starts,
    and the end; padding in a row is one of them. longest: slots of the longest. padding [m]: its
    slots; None: there is none."""

    offsets: Tensor
    longest: int
    padding: Tensor | None


class Kernel(NamedTuple):
    """forward(query, key, value, queries, scale) -> output [B, h, M, d] and log-sum-exp [B, h, M];
    backward(gradient, query, key, value, output, log-sum-exp, queries, scale) -> gradients of
    query, key and value. takes(query, queries): whether it can. in_runs: it walks any queries
    `InRuns`."""

    takes: Callable[[Tensor, PackedQueries], bool]
    forward: Callable[[Tensor, Tensor, Tensor, Any, float], tuple[Tensor, Tensor]]
    backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Any, float], Gradients]
    in_runs: bool = False


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of a softmax over scores of that dtype, and of sums."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def over_group(gradient: Tensor, dim: int) -> Tensor:
    """The gradient of what the query heads of a group share: its sum over `dim`, the heads."""
    return gradient.squeeze(dim) if gradient.shape[dim] == 1 else gradient.sum(dim)


# ------------------------------------------------------------------ CPU


def _cpu_forward(
    q: Tensor, k: Tensor, v: Tensor, queries: InRuns, scale: float
) -> tuple[Tensor, Tensor]:
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


def _cpu_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    queries: InRuns,
    scale: float,
) -> Gradients:
    dq, dtype = torch.empty_like(q), statistics_dtype(q.dtype)
    dk, dv = (x.new_zeros(x.shape, dtype=dtype) for x in (k, v))
    for run in queries.runs:
        (g, o, *tensors), mask = _of_run(run, queries, (grad, out, q), (k, v))
        l = lse[run.row, :, run.queries].unflatten(0, tensors[0].shape[:2])
        a, b, c = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            g, *tensors, o, l, 0.0, run.causal, attn_mask=mask, scale=scale
        )
        dq[run.row, :, run.queries] = a.flatten(0, 1)
        dk[run.row, :, run.keys] += over_group(b.to(dtype), 1)
        dv[run.row, :, run.keys] += over_group(c.to(dtype), 1)
    return dq, dk.to(k.dtype), dv.to(v.dtype)


def _of_run(
    run: Run, queries: InRuns, per_query: tuple[Tensor, ...], per_key: tuple[Tensor, ...]
) -> tuple[list[Tensor], Tensor | None]:
    """The run's part of tensors [B, h, M, d] and [B, g, T, d], each [g, h/g, ·, d], and its mask.
    Keys and values are repeated for the heads of a group without a copy."""
    c, groups = run.queries.stop - run.queries.start, per_key[0].shape[1]
    repeat, given = per_query[0].shape[1] // groups, per_key[0].dtype
    dtype = statistics_dtype(given) if c < SHORT else given
    tensors = [
        x[run.row, :, run.queries].to(dtype).unflatten(0, (groups, repeat)) for x in per_query
    ]
    tensors += [
        x[run.row, :, run.keys].to(dtype)[:, None].expand(-1, repeat, -1, -1) for x in per_key
    ]
    tensors = [x if x.stride(-1) == 1 else x.contiguous() for x in tensors]
    if run.causal:
        return tensors, None
    hidden = queries.hidden(run.queries, run.keys, slice(run.row, run.row + 1))
    return (
        tensors,
        torch.zeros_like(hidden, dtype=dtype).masked_fill_(hidden, float("-inf"))[:, None],
    )


# ------------------------------------------------------------------ CUDA


def _cuda_takes(query: Tensor, queries: PackedQueries) -> bool:
    """FlashAttention 2: half precision, a width of at most 256, Ampere or later; documents in one
    piece."""
    if query.dtype not in (torch.float16, torch.bfloat16):
        return False
    if query.shape[-1] > 256 or torch.version.hip is not None:
        return False
    if query.is_cuda and torch.cuda.get_device_capability(query.device) < (8, 0):
        return False
    return queries.documents is not None


def _cuda_forward(
    q: Tensor, k: Tensor, v: Tensor, queries: PackedQueries, scale: float
) -> tuple[Tensor, Tensor]:
    q, (k, v), documents = (
        _per_slot(q, queries),
        (_laid_out(x) for x in (k, v)),
        _documents(queries),
    )
    offsets, longest, padding = documents
    out, lse, *_ = aten._flash_attention_forward(
        q,
        k,
        v,
        offsets,
        offsets,
        longest,
        longest,
        0.0,
        True,
        False,
        scale=scale,
        **_window(queries),
    )  # [B·T, h, d], [h, B·T]
    if padding is not None:
        key, value = _repeated(q, k[padding], v[padding])
        out[padding] = value
        lse[:, padding] = (q[padding].to(lse.dtype) * key).sum(-1).mul_(scale).t()
    return _at_queries(out, queries), _at_queries(lse.t()[..., None], queries)[..., 0]


def _cuda_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    queries: PackedQueries,
    scale: float,
) -> Gradients:
    B, T = queries.segment_ids.shape
    grad, q, out, lse = (_per_slot(x, queries) for x in (grad, q, out, lse[..., None]))
    (k, v), (offsets, longest, padding) = (_laid_out(x) for x in (k, v)), _documents(queries)
    lse, of_documents = lse[..., 0], grad
    if padding is not None:
        of_documents = grad.index_fill(0, padding, 0)
    seed, unused = (
        torch.zeros(2, dtype=torch.uint64, device=q.device),
        q.new_empty(0),
    )  # of dropout: none
    dq, dk, dv = aten._flash_attention_backward(
        of_documents,
        q,
        k,
        v,
        out,
        lse.t().contiguous(),
        offsets,
        offsets,
        longest,
        longest,
        0.0,
        True,
        seed,
        unused,
        scale=scale,
        **_window(queries),
    )
    if padding is not None:  # its keys are seen by their own queries only
        g, o, own = (x[padding].to(lse.dtype) for x in (grad, out, q))
        key, value = _repeated(q, k[padding], v[padding])
        weight = ((own * key).sum(-1).mul_(scale) - lse[padding]).exp_()[..., None]
        score = (g * (value - o)).sum(-1, keepdim=True).mul_(weight).mul_(scale)
        dq[padding] = (score * key).to(dq.dtype)
        grouped = (k.shape[1], q.shape[1] // k.shape[1])
        dk[padding] = over_group((score * own).unflatten(1, grouped), 2).to(dk.dtype)
        dv[padding] = over_group((weight * g).unflatten(1, grouped), 2).to(dv.dtype)
    return _at_queries(dq, queries), *(x.unflatten(0, (B, T)).transpose(1, 2) for x in (dk, dv))


def _documents(queries: PackedQueries) -> Documents:
    assert queries.documents is not None  # by _cuda_takes
    return queries.documents


def _window(queries: PackedQueries) -> dict[str, int]:
    """The kernel's arguments for it: keys before a query, its own not counted, and behind."""
    return (
        {}
        if queries.window is None
        else {"window_size_left": queries.window - 1, "window_size_right": 0}
    )


def _laid_out(x: Tensor) -> Tensor:
    """[B, g, T, d] -> [B·T, g, d]."""
    return x.transpose(1, 2).flatten(0, 1)


def _per_slot(x: Tensor, queries: PackedQueries) -> Tensor:
    """[B, h, M, d] of the queries -> [B·T, h, d] of all slots; zeros where a slot has no query."""
    if queries.chosen is not None:
        index = queries.chosen[:, None, :, None].expand_as(x)
        slots = queries.segment_ids.shape[1]
        x = (
            x.new_zeros(x.shape[0], slots, x.shape[1], x.shape[3])
            .transpose(1, 2)
            .scatter(2, index, x)
        )
    return _laid_out(x).contiguous()


def _at_queries(x: Tensor, queries: PackedQueries) -> Tensor:
    """[B·T, h, d] of all slots -> [B, h, M, d] of the queries."""
    x = x.unflatten(0, queries.segment_ids.shape).transpose(1, 2)
    if queries.chosen is None:
        return x
    return x.gather(2, queries.chosen[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))


def _repeated(q: Tensor, *per_group: Tensor) -> Iterator[Tensor]:
    """[m, g, d] -> [m, h, d], a group's for each of its query heads."""
    return (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in per_group)


KERNELS = {  # by kind of device
    "cpu": Kernel(lambda query, queries: True, _cpu_forward, _cpu_backward, in_runs=True),
    "cuda": Kernel(_cuda_takes, _cuda_forward, _cuda_backward),
}
