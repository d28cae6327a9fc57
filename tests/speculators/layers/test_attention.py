"""Attention over the depths of an unroll and of draft blocks: the fused kernel gives the values and
gradients of explicit scores."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor

from draftsmith.speculators.layers import attention as module
from draftsmith.speculators.layers import queries as geometry
from draftsmith.speculators.layers.attention import attention, explicit_attention
from draftsmith.speculators.layers.queries import Blocks, PackedQueries, Queries

DOCUMENTS = {
    "one": [[(0, 24)], [(4, 24)]],
    "ragged": [[(0, 7), (1, 1), (2, 11), (-1, 5)], [(5, 3), (9, 17), (-1, 4)]],
    "interrupted": [[(0, 5), (-1, 3), (0, 4), (-1, 2), (3, 10)], [(1, 6), (2, 8), (1, 10)]],
}
# Blocks: the second row ends with padding, has fewer blocks, and one that comes first again.
SEGMENTS = torch.tensor([[0] * 20 + [1] * 30, [0] * 10 + [1] * 25 + [-1] * 15])
POSITIONS = torch.tensor([[*range(20), *range(30)], [*range(10), *range(25), *[0] * 15]])
LAST = torch.tensor([[0, 3, 4, 18, 21, 30, 31, 40, 48], [5, 1, 12, 20, 30, 33, -1, -1, -1]])


def packed(documents: str, chosen: str) -> PackedQueries:
    """Queries of all slots, of some in their order, or of some whose last ones only fill the row
    up."""
    segments = torch.tensor([[s for s, n in row for _ in range(n)] for row in DOCUMENTS[documents]])
    if chosen == "all":
        return PackedQueries(segments)
    noise = torch.rand(segments.shape, generator=torch.Generator().manual_seed(5))
    some = noise.argsort(1)[:, :13].sort(1).values
    filled = torch.cat([some[:, 6:], some[:, :6]], 1)
    return PackedQueries(segments, some if chosen == "some" else filled)


def blocks(causal: bool = False, window: int | None = None) -> Blocks:
    places = POSITIONS.gather(1, LAST.clamp_min(0))[..., None] + 1 + torch.arange(5)
    return Blocks(LAST, places, POSITIONS, SEGMENTS, causal, window)


def tensors(
    queries: Queries,
    pairs: int = 1,
    heads: tuple[int, int] = (4, 2),
    widths: tuple[int, int] = (8, 8),
    dtype: torch.dtype = torch.float64,
) -> list[Tensor]:
    """Query, key and value, the own pairs', and a gradient, as views of slot-major memory."""
    (h, g), (d, v) = heads, widths
    T, M = (24, queries.slots.shape[1]) if isinstance(queries, PackedQueries) else (50, 45)
    generator = torch.Generator().manual_seed(1)
    sizes = [(M, h, d), (T, g, d), (T, g, v), *((M, g, d), (M, g, v)) * pairs, (M, h, v)]
    made = [torch.randn(2, n, heads, width, generator=generator) for n, heads, width in sizes]
    return [x.to(dtype).transpose(1, 2) for x in made]


def results(attend: Callable, given: list[Tensor], queries: Queries) -> list[Tensor]:
    *inputs, gradient = (x.detach().requires_grad_() for x in given)
    own = list(zip(inputs[3::2], inputs[4::2]))
    out = attend(inputs[0], (inputs[1], inputs[2]), own, queries, 0.4)
    return [out, *torch.autograd.grad(out, inputs, gradient)]


def compare(given: list[Tensor], queries: Queries, tolerance: float = 1e-12) -> None:
    reference = results(explicit_attention, given, queries)
    for a, b in zip(results(attention, given, queries), reference, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)


@pytest.fixture(autouse=True)
def short_calls(monkeypatch):
    monkeypatch.setattr(geometry, "MASKED_QUERIES", 4)


@pytest.mark.parametrize("window", [None, 1, 3, 9, 30])
@pytest.mark.parametrize("documents, chosen", product(DOCUMENTS, ["all", "some", "filled up"]))
def test_chains(documents, chosen, window):
    """The kernel gives what scores give, and a key is read if it is near enough."""
    whole = packed(documents, chosen)
    queries = whole.within(window)
    for depths in (0, 1, 3):
        compare(tensors(queries, depths), queries)
    rows, slots = slice(0, queries.slots.shape[1]), torch.arange(24)
    far = queries.slots[..., None] - slots >= (window or 24)
    assert torch.equal(queries.hidden(rows, slice(0, 24)), whole.hidden(rows, slice(0, 24)) | far)


@pytest.mark.parametrize("longest_run", [4, 20, 256])
@pytest.mark.parametrize("window", [None, 1, 3, 7, 40])
def test_blocks(monkeypatch, window, longest_run):
    """Windows of 1 and 3 leave slots of a block without a context, as rows with fewer blocks leave
    whole ones."""
    monkeypatch.setattr(geometry, "MASKED_QUERIES", longest_run)
    for causal in (False, True):
        compare(tensors(blocks()), blocks(causal, window))


@pytest.mark.parametrize("heads", [(1, 1), (3, 3), (6, 2), (4, 1)])
@pytest.mark.parametrize("widths", [(8, 8), (12, 5), (5, 12)])
def test_heads_in_groups_and_values_of_another_width(heads, widths):
    for queries in (packed("ragged", "some"), blocks()):
        compare(tensors(queries, 1, heads, widths), queries)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
@pytest.mark.parametrize("short", [1, 1 << 20])
def test_precisions(monkeypatch, dtype, tolerance, short):
    monkeypatch.setattr(module, "SHORT", short)
    for queries in (packed("ragged", "all"), packed("ragged", "some"), blocks()):
        compare(tensors(queries, dtype=dtype), queries, tolerance)


def test_half_precision_under_autocast_is_near_the_exact_value():
    exact = results(attention, tensors(blocks()), blocks())
    with torch.autocast("cpu", torch.bfloat16):
        found = results(attention, tensors(blocks(), dtype=torch.bfloat16), blocks())
    for a, b in zip(found, exact, strict=True):
        assert a.dtype == torch.bfloat16 and (a.double() - b).norm() < 0.02 * b.norm()


@pytest.mark.parametrize("queries", [packed("ragged", "some"), packed("one", "all"), blocks()])
def test_chunks_of_scores_computed_again(monkeypatch, queries):
    whole = results(explicit_attention, tensors(queries), queries)
    monkeypatch.setattr(module, "QUERIES", 8)
    monkeypatch.setattr(module, "KEPT_SCORES", 8)
    for a, b in zip(results(explicit_attention, tensors(queries), queries), whole, strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)


def test_nothing_as_large_as_scores_waits_for_the_backward_pass():
    """What is kept is what was given, the output, and a log-sum-exp of each query."""
    kept: list[int] = []

    def keep(x: Tensor) -> Tensor:
        kept.append(x.numel())
        return x

    for queries in (packed("one", "all"), blocks()):
        given = tensors(queries)
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            results(attention, given, queries)
        assert 0 < sum(kept) <= sum(x.numel() for x in given) + given[0][..., 0].numel()


@pytest.mark.parametrize("rows, queries, kept", [(1, 16, True), (1, 48, True), (8, 16, False)])
def test_no_more_explicit_scores_wait_than_may(monkeypatch, rows, queries, kept):
    """Of one depth: by their number, rows and heads counted, and not by the length of a row."""
    monkeypatch.setattr(module, "KEPT_SCORES", 4 * 64 * 64)
    sizes: list[int] = []
    query, key, value = (torch.randn(rows, 4, n, 8, requires_grad=True) for n in (queries, 64, 64))
    chosen = torch.arange(queries).expand(rows, -1)
    asking = PackedQueries(torch.zeros(rows, 64, dtype=torch.long), chosen)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: sizes.append(t.numel()) or t, lambda t: t
    ):
        explicit_attention(query, (key, value), (), asking, 1.0).sum().backward()
    assert (max(sizes) >= rows * 4 * queries * 64) == kept


def test_the_calls_of_the_kernel():
    """One for each document in one piece, without a mask; padding sees itself, in calls with one; a
    window bounds the keys of a call."""
    runs = [run for run in packed("ragged", "all").runs if run.row == 0]
    lengths = [(run.causal, run.keys.stop - run.keys.start) for run in runs]
    assert lengths == [(True, 7), (True, 1), (True, 11), (False, 4), (False, 1)]
    windowed = PackedQueries(torch.zeros(1, 4096, dtype=torch.long), window=100)
    assert max(run.keys.stop - run.keys.start for run in windowed.runs) < 100 + 4
