"""Random layouts of rows for the attention of heads, and tensors for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.speculators.layers.queries import Blocks, PackedQueries, Queries

# kind of queries -> the most own pairs that they have
KINDS = {"chains": 3, "chosen chains": 3, "blocks": 1, "causal blocks": 1}
ROWS = 3
LENGTH = 40  # slots of a row
BLOCKS = 6
WIDTH = 4


@dataclass(frozen=True)
class Rows:
    """Packed documents [B, T] and their positions; some rows end with padding."""

    segment_ids: Tensor
    positions: Tensor


def random_rows(generator: torch.Generator) -> Rows:
    """Each row begins with a document, the rest is cut at random; the second row has no padding."""
    draw = torch.rand(ROWS, LENGTH, generator=generator)
    begins = draw < 0.15
    begins[:, 0] = True
    slots = torch.arange(LENGTH).expand(ROWS, -1)
    segment_ids = begins.cumsum(1)
    positions = slots - (slots * begins).cummax(1).values
    filled = torch.randint(LENGTH // 2, LENGTH, (ROWS, 1), generator=generator)
    filled[1] = LENGTH
    padding = slots >= filled
    return Rows(segment_ids.masked_fill(padding, -1), positions.masked_fill(padding, 0))


def random_queries(kind: str, window: int | None, seed: int, device: str = "cpu") -> Queries:
    """Queries of a kind of KINDS over random rows, on a device."""
    generator = torch.Generator().manual_seed(seed)
    rows = random_rows(generator)
    segments = rows.segment_ids.to(device)
    if kind == "chains":
        return PackedQueries(segments, window=window)
    order = torch.rand(ROWS, LENGTH, generator=generator).argsort(1)
    if kind == "chosen chains":
        return PackedQueries(segments, order[:, : LENGTH // 3].to(device), window)
    last = order[:, :BLOCKS]
    last = last.masked_fill(rows.segment_ids.gather(1, last) < 0, -1)
    last[0, -1] = -1  # a block without context
    places = rows.positions.gather(1, last.clamp_min(0))[..., None] + 1 + torch.arange(WIDTH)
    tensors = (x.to(device) for x in (last, places, rows.positions))
    return Blocks(*tensors, segments, kind == "causal blocks", window)


def visible(queries: Queries) -> Tensor:
    """bool [B, M, T]: what the walk over rows lets each query see."""
    M = queries_of_row(queries)
    whole = slice(0, queries.segment_ids.shape[1])
    rows = range(len(queries.segment_ids))
    return torch.stack([~queries.hidden(row, slice(0, M), whole) for row in rows])


def queries_of_row(queries: Queries) -> int:
    if isinstance(queries, PackedQueries):
        return queries.slots.shape[1]
    return queries.last_context.shape[1] * queries.width


def random_tensors(
    queries: Queries, pairs: int, dtype: torch.dtype, head_dim: int = 16
) -> list[Tensor]:
    """Query, key and value, those of `pairs` own pairs, and a gradient: of four heads in two
    groups, as views of slot-major memory, on the device of `queries`."""
    B, T = queries.segment_ids.shape
    M = queries_of_row(queries)
    sizes = [(M, 4), (T, 2), (T, 2), *[(M, 2)] * (2 * pairs), (M, 4)]
    generator = torch.Generator().manual_seed(pairs)
    states = [torch.randn(B, n, heads, head_dim, generator=generator) for n, heads in sizes]
    device = queries.segment_ids.device
    return [x.to(device, dtype).transpose(1, 2) for x in states]


def output_and_gradients(attend: Callable, tensors: list[Tensor], queries: Queries) -> list[Tensor]:
    """What `attend` gives for `random_tensors`, and the gradients of all its inputs."""
    *inputs, gradient = (x.detach().requires_grad_() for x in tensors)
    pairs = list(zip(inputs[3::2], inputs[4::2], strict=True))
    out = attend(inputs[0], (inputs[1], inputs[2]), pairs, queries, 0.3)
    return [out, *torch.autograd.grad(out, inputs, gradient)]
