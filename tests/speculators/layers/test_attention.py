"""Attention over depths of an unroll and over blocks: a softmax over all keys that are seen."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from draftsmith.speculators.layers import attention as module
from draftsmith.speculators.layers.attention import attention
from draftsmith.speculators.layers.queries import Blocks, PackedQueries, Queries

DOCUMENTS = {
    "one": [[(0, 24)], [(4, 24)]],
    "ragged": [[(0, 7), (1, 1), (2, 11), (-1, 5)], [(5, 3), (9, 17), (-1, 4)]],
}
# Blocks: the second row ends with padding, has fewer blocks, and one that comes first again.
SEGMENTS = torch.tensor([[0] * 20 + [1] * 30, [0] * 10 + [1] * 25 + [-1] * 15])
POSITIONS = torch.tensor([[*range(20), *range(30)], [*range(10), *range(25), *[0] * 15]])
LAST = torch.tensor([[0, 3, 4, 18, 21, 30, 31, 40, 48], [5, 1, 12, 20, 30, 33, -1, -1, -1]])
WIDTH = 5


def packed(documents: str, chosen: str, window: int | None = None) -> PackedQueries:
    """Queries of all slots, of some in their order, or with some that only fill the row up."""
    segments = torch.tensor([[s for s, n in row for _ in range(n)] for row in DOCUMENTS[documents]])
    if chosen == "all":
        return PackedQueries(segments, window=window)
    noise = torch.rand(segments.shape, generator=torch.Generator().manual_seed(5))
    chosen_slots = noise.argsort(1)[:, :13].sort(1).values
    filled = torch.cat([chosen_slots[:, 6:], chosen_slots[:, :6]], 1)
    return PackedQueries(segments, chosen_slots if chosen == "some" else filled, window)


def blocks(causal: bool = False, window: int | None = None) -> Blocks:
    places = POSITIONS.gather(1, LAST.clamp_min(0))[..., None] + 1 + torch.arange(WIDTH)
    return Blocks(LAST, places, POSITIONS, SEGMENTS, causal, window)


def sees(queries: Queries, row: int, query: int, slot: int) -> bool:
    if isinstance(queries, PackedQueries):
        slot_of_query, segments = int(queries.slots[row, query]), queries.segment_ids[row]
        near = queries.window is None or slot_of_query - slot < queries.window
        return slot_of_query == slot or bool(
            slot < slot_of_query and segments[slot_of_query] == segments[slot] >= 0 and near
        )
    last = int(LAST[row, query // WIDTH])
    behind = int(POSITIONS[row, last]) + 1 + query % WIDTH - int(POSITIONS[row, slot])
    near = queries.window is None or behind < queries.window
    return bool(0 <= slot <= last and SEGMENTS[row, slot] == SEGMENTS[row, last] and near)


def sees_own(queries: Queries, query: int, key: int) -> bool:
    if query // queries.width != key // queries.width:
        return False
    if not isinstance(queries, Blocks):
        return True
    near = queries.window is None or query - key < queries.window
    return near and not (queries.causal and key > query)


def by_definition(
    query: Tensor, context: tuple[Tensor, Tensor], pairs: list, queries: Queries, scale: float
) -> Tensor:
    (B, h, M, _), T = query.shape, context[0].shape[2]
    seen = [[[sees(queries, b, m, t) for t in range(T)] for m in range(M)] for b in range(B)]
    within = [[sees_own(queries, m, k) for k in range(M)] for m in range(M)]
    seen = torch.cat([torch.tensor(seen), *[torch.tensor([within] * B)] * len(pairs)], -1)
    shared = h // context[0].shape[1]
    key, value = (
        torch.cat(parts, 2).repeat_interleave(shared, 1) for parts in zip(context, *pairs)
    )
    scores = (query @ key.mT * scale).masked_fill(~seen[:, None], float("-inf"))
    return scores.softmax(-1) @ value


def tensors(queries: Queries, pairs: int = 1) -> list[Tensor]:
    """Query, key and value, the own pairs', and a gradient, as views of slot-major memory: of six
    heads in two groups, values of another width than keys."""
    h, g, d, v = 6, 2, 12, 5
    T, M = (24, queries.slots.shape[1]) if isinstance(queries, PackedQueries) else (50, 45)
    generator = torch.Generator().manual_seed(1)
    sizes = [(M, h, d), (T, g, d), (T, g, v), *((M, g, d), (M, g, v)) * pairs, (M, h, v)]
    states = [torch.randn(2, n, heads, width, generator=generator) for n, heads, width in sizes]
    return [x.double().transpose(1, 2) for x in states]


def results(attend, tensors_of_case: list[Tensor], queries: Queries) -> list[Tensor]:
    *inputs, gradient = (x.detach().requires_grad_() for x in tensors_of_case)
    pairs = list(zip(inputs[3::2], inputs[4::2]))
    out = attend(inputs[0], (inputs[1], inputs[2]), pairs, queries, 0.4)
    return [out, *torch.autograd.grad(out, inputs, gradient)]


def compare(queries: Queries, pairs: int = 1) -> None:
    arguments = tensors(queries, pairs)
    expected = results(by_definition, arguments, queries)
    torch.testing.assert_close(
        results(attention, arguments, queries), expected, atol=1e-12, rtol=1e-12
    )


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch):
    monkeypatch.setattr(module, "QUERIES", 7)


@pytest.mark.parametrize("window", [None, 1, 3, 30])
@pytest.mark.parametrize(
    "documents, chosen", list(product(DOCUMENTS, ["all", "some", "filled up"]))
)
def test_attention_of_chains_is_a_softmax_over_what_they_see(documents, chosen, window):
    for depths in (0, 3):
        compare(packed(documents, chosen, window), depths)


@pytest.mark.parametrize("window", [None, 1, 3, 40])
@pytest.mark.parametrize("causal", [False, True])
def test_attention_of_blocks_is_a_softmax_over_what_they_see(causal, window):
    compare(blocks(causal, window))


def test_attention_in_half_precision_under_autocast_is_near_the_exact_value():
    exact = results(attention, tensors(blocks()), blocks())
    with torch.autocast("cpu", torch.bfloat16):
        half = results(attention, [x.bfloat16() for x in tensors(blocks())], blocks())
    for a, b in zip(half, exact, strict=True):
        assert a.dtype == torch.bfloat16 and (a.double() - b).norm() < 0.02 * b.norm()


def test_attention_keeps_no_scores_for_the_backward_pass():
    sizes: list[int] = []
    query, key, value = (torch.randn(2, 4, 64, 8, requires_grad=True) for _ in range(3))
    queries = PackedQueries(torch.zeros(2, 64, dtype=torch.long))
    keep = lambda x: sizes.append(x.numel()) or x
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        attention(query, (key, value), [(key, value)], queries, 1.0)
    assert max(sizes) == query.numel()
