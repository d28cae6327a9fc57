"""Attention over the depths of an unroll: fused kernels give the values and gradients of explicit
scores."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from speculators.layers import fused_attention
from speculators.layers.attention import explicit_attention, unrolled_attention
from speculators.layers.fused_attention import KERNELS, PackedQueries

DOCUMENTS = {
    "one": [[(0, 24)], [(4, 24)]],
    "ragged": [[(0, 7), (1, 1), (2, 11), (-1, 5)], [(5, 3), (9, 17), (-1, 4)]],
    "interrupted": [[(0, 5), (-1, 3), (0, 4), (-1, 2), (3, 10)], [(1, 6), (2, 8), (1, 10)]],
}


def packed(documents: str, chosen: str) -> PackedQueries:
    """Queries of all slots, of some in their order, or of some whose last ones only fill the row
    up."""
    segments = torch.tensor([[s for s, n in row for _ in range(n)] for row in DOCUMENTS[documents]])
    if chosen == "all":
        return PackedQueries(segments)
    some = (
        torch.rand(segments.shape, generator=torch.Generator().manual_seed(5))
        .argsort(1)[:, :13]
        .sort(1)
        .values
    )
    return PackedQueries(
        segments, some if chosen == "some" else torch.cat([some[:, 6:], some[:, :6]], 1)
    )


def tensors(
    queries: PackedQueries,
    depths: int,
    heads: tuple[int, int] = (4, 2),
    widths=(8, 8),
    dtype=torch.float64,
) -> list[torch.Tensor]:
    """Query, key and value, the diagonals', and a gradient, as views of slot-major memory."""
    (h, g), (d, v), (B, M), T = heads, widths, queries.slots.shape, queries.segment_ids.shape[1]
    torch.manual_seed(1)
    sizes = [(M, h, d), (T, g, d), (T, g, v), *((M, g, d), (M, g, v)) * depths, (M, h, v)]
    return [torch.randn(B, n, heads, width).to(dtype).transpose(1, 2) for n, heads, width in sizes]


def results(attention, given: list[torch.Tensor], queries: PackedQueries) -> list[torch.Tensor]:
    *inputs, gradient = (x.detach().requires_grad_() for x in given)
    out = attention(*inputs[:3], list(zip(inputs[3::2], inputs[4::2])), queries, 0.4)
    return [out, *torch.autograd.grad(out, inputs, gradient)]


def compare(given: list[torch.Tensor], queries: PackedQueries, **tolerance: float) -> None:
    reference = results(explicit_attention, given, queries)
    for a, b in zip(results(unrolled_attention, given, queries), reference, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        torch.testing.assert_close(a, b, **tolerance)


@pytest.fixture(autouse=True)
def short_calls(monkeypatch):
    monkeypatch.setattr(fused_attention, "MASKED_QUERIES", 4)


@pytest.mark.parametrize("depths", [0, 1, 3])
@pytest.mark.parametrize("chosen", ["all", "some", "filled up"])
@pytest.mark.parametrize("documents", DOCUMENTS)
def test_no_scores_give_what_scores_give(documents, chosen, depths):
    queries = packed(documents, chosen)
    compare(tensors(queries, depths), queries, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("window", [1, 3, 9, 30])
@pytest.mark.parametrize("chosen", ["all", "some", "filled up"])
@pytest.mark.parametrize("documents", DOCUMENTS)
def test_a_window(documents, chosen, window):
    """Kernels give what scores give, and a key is read if it is near enough."""
    queries, whole = packed(documents, chosen).within(window), packed(documents, chosen)
    given = tensors(queries, 2)
    compare(given, queries, atol=1e-12, rtol=1e-12)
    slots = torch.arange(whole.segment_ids.shape[1])
    everything = slice(0, len(slots))
    near = queries.slots[..., None] - slots < window
    rows = slice(0, queries.slots.shape[1])
    assert torch.equal(queries.hidden(rows, everything), whole.hidden(rows, everything) | ~near)


def test_a_window_bounds_the_keys_of_a_call():
    queries = PackedQueries(torch.zeros(1, 4096, dtype=torch.long), window=100)
    assert (
        max(run.keys.stop - run.keys.start for run in queries.runs)
        < 100 + fused_attention.MASKED_QUERIES
    )


@pytest.mark.parametrize("heads", [(1, 1), (3, 3), (6, 2), (4, 1)])
@pytest.mark.parametrize("widths", [(8, 8), (12, 5), (5, 12)])
def test_heads_in_groups_and_values_of_another_width(heads, widths):
    queries = packed("ragged", "some")
    compare(tensors(queries, 2, heads, widths), queries, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
@pytest.mark.parametrize("short", [1, 1 << 20])
def test_precisions(monkeypatch, dtype, tolerance, short):
    monkeypatch.setattr(fused_attention, "SHORT", short)
    for chosen in ("all", "some"):
        queries = packed("ragged", chosen)
        compare(tensors(queries, 2, dtype=dtype), queries, atol=tolerance, rtol=tolerance)


def test_nothing_as_large_as_scores_is_made_or_kept():
    queries = PackedQueries(torch.arange(4).repeat_interleave(64)[None])
    given, kept = tensors(queries, 2), []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.append(t.numel()) or t, lambda t: t
    ):
        results(unrolled_attention, given, queries)
    assert max(kept) == max(x.numel() for x in given) < 256 * 256
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.append(t.numel()) or t, lambda t: t
    ):
        results(explicit_attention, given, queries)
    assert max(kept) > 256 * 256


def test_activations_computed_again():
    queries = packed("ragged", "some")
    given = tensors(queries, 2)

    def again(*arguments):
        return checkpoint(unrolled_attention, *arguments, use_reentrant=False)

    for a, b in zip(
        results(again, given, queries), results(unrolled_attention, given, queries), strict=True
    ):
        assert torch.equal(a, b)


def test_a_document_in_one_piece_has_no_mask():
    """One call for each, whatever it is as long as; padding sees itself, in calls with a mask."""
    queries = packed("ragged", "all")
    assert [
        (run.causal, run.keys.stop - run.keys.start) for run in queries.runs if run.row == 0
    ] == [
        (True, 7),
        (True, 1),
        (True, 11),
        (False, 4),
        (False, 1),
    ]


class Flash:
    """FlashAttention's calls, as `aten` knows them, by one softmax for each document."""

    def __init__(self, library: torch.library.Library) -> None:
        library.impl("_flash_attention_forward", self.forward, "CPU")
        library.impl("_flash_attention_backward", self.backward, "CPU")
        self.calls = 0

    def probabilities(
        self, q, k, offsets, scale, lse=None, window_size_left=None, window_size_right=None
    ):
        for a, b in pairwise(offsets.tolist()):
            own, keys = q[a:b], k[a:b].repeat_interleave(q.shape[1] // k.shape[1], 1)
            scores = torch.einsum("qhd,khd->hqk", own, keys) * scale
            hidden = torch.ones(b - a, b - a, dtype=torch.bool).triu(1)
            if window_size_left is not None:
                hidden |= torch.ones_like(hidden).tril(-window_size_left - 1)
                assert window_size_right == 0
            scores.masked_fill_(hidden, float("-inf"))
            norm = scores.logsumexp(-1) if lse is None else lse[:, a:b]
            yield slice(a, b), own, keys, norm, (scores - norm[..., None]).exp()

    def forward(self, q, k, v, offsets, same, longest, _, dropout, causal, debug, *, scale, **rest):
        assert causal and not dropout and offsets is same and longest == offsets.diff().max()
        self.calls += 1
        out, lse, repeat = (
            torch.empty_like(q),
            q.new_empty(q.shape[1], q.shape[0]),
            q.shape[1] // k.shape[1],
        )
        for part, _, _, norm, p in self.probabilities(q, k, offsets, scale, **rest):
            out[part] = torch.einsum("hqk,khd->qhd", p, v[part].repeat_interleave(repeat, 1))
            lse[:, part] = norm
        return out, lse, torch.zeros(2, dtype=torch.uint64), torch.zeros(0), torch.zeros(0)

    def backward(
        self,
        grad,
        q,
        k,
        v,
        out,
        lse,
        offsets,
        same,
        longest,
        _,
        dropout,
        causal,
        seed,
        unused,
        *,
        scale,
        **rest,
    ):
        dq, dk, dv, repeat = (
            torch.empty_like(q),
            torch.empty_like(k),
            torch.empty_like(v),
            q.shape[1] // k.shape[1],
        )
        for part, own, keys, _, p in self.probabilities(q, k, offsets, scale, lse, **rest):
            dp = torch.einsum("qhd,khd->hqk", grad[part], v[part].repeat_interleave(repeat, 1))
            ds = p * (dp - (grad[part] * out[part]).sum(-1).t()[..., None]) * scale
            dq[part] = torch.einsum("hqk,khd->qhd", ds, keys)
            dk[part] = torch.einsum("hqk,qhd->khd", ds, own).unflatten(1, (-1, repeat)).sum(2)
            dv[part] = torch.einsum("hqk,qhd->khd", p, grad[part]).unflatten(1, (-1, repeat)).sum(2)
        return dq, dk, dv


@pytest.fixture
def flash(monkeypatch):
    """The kernel of CUDA devices on CPU tensors of any precision."""
    real = KERNELS["cuda"]

    def takes(query, queries):
        return real.takes(query.to(torch.bfloat16), queries)

    monkeypatch.setitem(KERNELS, "cpu", real._replace(takes=takes))
    with torch.library._scoped_library("aten", "IMPL") as library:
        yield Flash(library)


@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize("depths", [0, 2])
@pytest.mark.parametrize("chosen", ["all", "some", "filled up"])
@pytest.mark.parametrize("documents", DOCUMENTS)
def test_one_call_for_all_documents_of_a_cuda_device(flash, documents, chosen, depths, window):
    queries = packed(documents, chosen).within(window)
    compare(tensors(queries, depths), queries, atol=1e-12, rtol=1e-12)
    assert flash.calls == (documents != "interrupted")


def test_what_a_cuda_device_leaves_to_scores():
    takes, queries = KERNELS["cuda"].takes, packed("ragged", "all")
    assert takes(torch.empty(2, 4, 24, 128, dtype=torch.bfloat16), queries)
    assert not takes(torch.empty(2, 4, 24, 128), queries)
    assert not takes(torch.empty(2, 4, 24, 264, dtype=torch.bfloat16), queries)
    assert not takes(torch.empty(2, 4, 24, 128, dtype=torch.bfloat16), packed("interrupted", "all"))
