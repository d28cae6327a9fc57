"""Attention over the depths of an unroll and of draft blocks: values and gradients of a softmax
over all keys that a query may see."""

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
    """Queries of all slots, of some in their order, or of some whose last ones only fill the row
    up."""
    segments = torch.tensor([[s for s, n in row for _ in range(n)] for row in DOCUMENTS[documents]])
    if chosen == "all":
        return PackedQueries(segments, window=window)
    noise = torch.rand(segments.shape, generator=torch.Generator().manual_seed(5))
    some = noise.argsort(1)[:, :13].sort(1).values
    filled = torch.cat([some[:, 6:], some[:, :6]], 1)
    return PackedQueries(segments, some if chosen == "some" else filled, window)


def blocks(causal: bool = False, window: int | None = None) -> Blocks:
    places = POSITIONS.gather(1, LAST.clamp_min(0))[..., None] + 1 + torch.arange(WIDTH)
    return Blocks(LAST, places, POSITIONS, SEGMENTS, causal, window)


def sees(queries: Queries, row: int, query: int, slot: int) -> bool:
    """Whether a query sees a slot of its row, by the definition."""
    if isinstance(queries, PackedQueries):
        own, segments = int(queries.slots[row, query]), queries.segment_ids[row]
        near = queries.window is None or own - slot < queries.window
        return own == slot or bool(slot < own and segments[own] == segments[slot] >= 0 and near)
    last = int(LAST[row, query // WIDTH])
    behind = int(POSITIONS[row, last]) + 1 + query % WIDTH - int(POSITIONS[row, slot])
    near = queries.window is None or behind < queries.window
    return bool(0 <= slot <= last and SEGMENTS[row, slot] == SEGMENTS[row, last] and near)


def sees_own(queries: Queries, query: int, key: int) -> bool:
    """Whether a query sees an own key, by the definition."""
    if query // queries.width != key // queries.width:
        return False
    if not isinstance(queries, Blocks):
        return True
    near = queries.window is None or query - key < queries.window
    return near and not (queries.causal and key > query)


def by_definition(
    query: Tensor, context: tuple[Tensor, Tensor], own: list, queries: Queries, scale: float
) -> Tensor:
    (B, h, M, _), T = query.shape, context[0].shape[2]
    seen = [
        [
            [sees(queries, b, m, t) for t in range(T)]
            + [sees_own(queries, m, k) for k in range(M)] * len(own)
            for m in range(M)
        ]
        for b in range(B)
    ]
    key, value = (
        torch.cat(parts, 2).repeat_interleave(h // context[0].shape[1], 1)
        for parts in zip(context, *own)
    )
    scores = (query @ key.mT * scale).masked_fill(~torch.tensor(seen)[:, None], float("-inf"))
    return scores.softmax(-1) @ value


def tensors(
    queries: Queries,
    pairs: int = 1,
    heads: tuple[int, int] = (4, 2),
    widths: tuple[int, int] = (8, 8),
) -> list[Tensor]:
    """Query, key and value, the own pairs', and a gradient, as views of slot-major memory."""
    (h, g), (d, v) = heads, widths
    T, M = (24, queries.slots.shape[1]) if isinstance(queries, PackedQueries) else (50, 45)
    generator = torch.Generator().manual_seed(1)
    sizes = [(M, h, d), (T, g, d), (T, g, v), *((M, g, d), (M, g, v)) * pairs, (M, h, v)]
    states = [torch.randn(2, n, heads, width, generator=generator) for n, heads, width in sizes]
    return [x.double().transpose(1, 2) for x in states]


def results(attend, given: list[Tensor], queries: Queries) -> list[Tensor]:
    *inputs, gradient = (x.detach().requires_grad_() for x in given)
    own = list(zip(inputs[3::2], inputs[4::2]))
    out = attend(inputs[0], (inputs[1], inputs[2]), own, queries, 0.4)
    return [out, *torch.autograd.grad(out, inputs, gradient)]


def compare(given: list[Tensor], queries: Queries) -> None:
    reference = results(by_definition, given, queries)
    torch.testing.assert_close(
        results(attention, given, queries), reference, atol=1e-12, rtol=1e-12
    )


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch):
    monkeypatch.setattr(module, "QUERIES", 7)


@pytest.mark.parametrize("window", [None, 1, 3, 30])
@pytest.mark.parametrize("documents, chosen", product(DOCUMENTS, ["all", "some", "filled up"]))
def test_attention_of_chains_is_a_softmax_over_what_they_see(documents, chosen, window):
    queries = packed(documents, chosen, window)
    for depths in (0, 3):
        compare(tensors(queries, depths), queries)


@pytest.mark.parametrize("window", [None, 1, 3, 40])
@pytest.mark.parametrize("causal", [False, True])
def test_attention_of_blocks_is_a_softmax_over_what_they_see(causal, window):
    """Windows of 1 and 3 leave slots of a block without a context, as rows with fewer blocks leave
    whole ones."""
    queries = blocks(causal, window)
    compare(tensors(queries), queries)


@pytest.mark.parametrize("heads, widths", [((6, 2), (12, 5)), ((4, 1), (5, 12))])
def test_attention_takes_heads_in_groups_and_values_of_another_width(heads, widths):
    for queries in (packed("ragged", "some"), blocks()):
        compare(tensors(queries, 1, heads, widths), queries)


def test_attention_in_half_precision_under_autocast_is_near_the_exact_value():
    exact = results(attention, tensors(blocks()), blocks())
    with torch.autocast("cpu", torch.bfloat16):
        half = results(attention, [x.bfloat16() for x in tensors(blocks())], blocks())
    for a, b in zip(half, exact, strict=True):
        assert a.dtype == torch.bfloat16 and (a.double() - b).norm() < 0.02 * b.norm()


@pytest.mark.parametrize("rows, queries, kept", [(1, 16, True), (1, 48, True), (8, 16, False)])
def test_attention_keeps_no_more_scores_for_the_backward_pass_than_it_may(
    monkeypatch, rows, queries, kept
):
    """By their number, rows and heads counted, and not by the length of a row; what is not kept is
    computed again."""
    monkeypatch.setattr(module, "QUERIES", 64)
    sizes: list[int] = []
    query, key, value = (torch.randn(rows, 4, n, 8, requires_grad=True) for n in (queries, 64, 64))
    chosen = torch.arange(64 - queries, 64).expand(rows, -1)
    asking = PackedQueries(torch.zeros(rows, 64, dtype=torch.long), chosen)
    gradients = []
    for scores in (4 * 64 * 64, 1 << 30):
        monkeypatch.setattr(module, "SCORES", scores)
        keep = lambda x: sizes.append(x.numel()) or x
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            out = attention(query, (key, value), (), asking, 1.0)
        if len(gradients) == 0:
            assert (max(sizes) >= rows * 4 * queries * 64) == kept
        gradients.append(torch.autograd.grad(out.sum(), (query, key, value)))
    torch.testing.assert_close(*gradients)
