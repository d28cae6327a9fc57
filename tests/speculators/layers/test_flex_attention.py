"""Attention of heads by flex_attention: it sees, computes and learns what the walk over rows does.

A CPU has no backward pass of flex_attention: there a dense attention stands in its place."""

from __future__ import annotations

from functools import partial
from itertools import product

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_mask

from draftsmith.speculators import kernels
from draftsmith.speculators.layers import flex_attention as flex
from draftsmith.speculators.layers.attention import attention
from draftsmith.speculators.layers.queries import PackedQueries
from tests.support.attention_cases import (
    KINDS,
    output_and_gradients,
    queries_of_row,
    random_queries,
    random_tensors,
    visible,
)

WINDOWS = (None, 1, 3, 11)
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


def dense(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scale: float) -> flex.Pair:
    """`flex.attend_context` with all scores in memory."""
    seen = create_mask(mask.mask_mod, len(query), 1, query.shape[2], key.shape[2], "cpu")
    shared = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(shared, dim=1) for x in (key, value))
    scores = (query @ key.mT * scale).masked_fill(~seen, -1e30)
    return scores.softmax(-1) @ value, scores.logsumexp(-1)


@pytest.mark.parametrize("kind, window", list(product(KINDS, WINDOWS)))
def test_mask_mod_of_random_rows_shows_the_slots_that_the_walk_sees(kind, window):
    for seed in range(8):
        queries = random_queries(kind, window, seed)
        B, T = queries.segment_ids.shape
        seen = create_mask(flex.sees(queries), B, 1, queries_of_row(queries), T, "cpu")
        assert torch.equal(seen[:, 0], visible(queries))


@pytest.mark.parametrize("kind, window", list(product(KINDS, (None, 3))))
def test_flex_output_and_log_sum_exp_are_those_of_all_scores(kind, window):
    queries = random_queries(kind, window, seed=1)
    query, key, value, _ = random_tensors(queries, 0, torch.float32)
    mask = flex.block_mask(queries)
    out, lse = flex.attend_context(query, key, value, mask, 0.3)
    expected, expected_lse = dense(query, key, value, mask, 0.3)
    sees_any = visible(queries).any(-1)[:, None].expand_as(lse)  # a block may have no context
    torch.testing.assert_close(lse[sees_any], expected_lse[sees_any], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(out[sees_any], expected[sees_any], atol=1e-5, rtol=1e-5)
    assert (lse[~sees_any] == -torch.inf).all()
    assert (out[~sees_any] == 0).all()


@pytest.mark.parametrize("kind, window", list(product(KINDS, (None, 3))))
def test_flex_output_merged_with_own_keys_is_the_walks(kind, window):
    queries = random_queries(kind, window, seed=2)
    query, key, value, *pairs, _ = random_tensors(queries, KINDS[kind], torch.float32)
    own_pairs = list(zip(pairs[::2], pairs[1::2], strict=True))
    arguments = (query, (key, value), own_pairs, queries, 0.3)
    torch.testing.assert_close(
        flex.merged_attention(*arguments), attention(*arguments), atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("kind, window", list(product(KINDS, WINDOWS)))
def test_gradients_of_the_merge_are_the_walks(kind, window):
    queries = random_queries(kind, window, seed=3)
    for pairs in {1, KINDS[kind]}:
        tensors = random_tensors(queries, pairs, torch.float64)
        merged = lambda *arguments: flex.merged_attention(*arguments, attend=dense)
        torch.testing.assert_close(
            output_and_gradients(merged, tensors, queries),
            output_and_gradients(attention, tensors, queries),
            atol=1e-10,
            rtol=1e-10,
        )


def test_layers_with_the_same_queries_share_one_block_mask():
    queries = PackedQueries(torch.zeros(2, 8, dtype=torch.long))
    assert flex.block_mask(queries) is flex.block_mask(queries)
    windowed = queries.within(3)
    assert flex.block_mask(windowed) is flex.block_mask(queries.within(3))
    assert flex.block_mask(windowed) is not flex.block_mask(queries.within(2))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["chosen chains", "blocks"])
def test_kernels_are_traced_once_for_all_windows_layouts_and_numbers_of_queries(kind, monkeypatch):
    graphs: list[object] = []

    def keep(module, _):
        graphs.append(module)
        return module.forward

    torch._dynamo.reset()
    create = torch.compile(flex.create_block_mask, backend=keep)
    attend = torch.compile(flex.flex_attention, backend=keep)
    monkeypatch.setattr(flex, "create_block_mask", create)
    monkeypatch.setattr(flex, "flex_attention", attend)
    for window, seed in product((2, 3, 5, 7), (1, 2)):
        queries = random_queries(kind, window, seed)
        query, key, value, _ = random_tensors(queries, 0, torch.float32)
        flex.attend_context(query, key, value, flex.block_mask(queries), 0.3)
    assert len(graphs) == 2


@pytest.mark.slow
def test_kernels_stay_compiled_through_batches_lengths_heads_and_modes(monkeypatch):
    """A function that was compiled too often would run eager from then on, with all scores."""
    calls: list[object] = []

    def keep(module, _):
        return lambda *inputs: calls.append(module) or module.forward(*inputs)

    torch._dynamo.reset()
    kernels.compiled.cache_clear()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=keep))
    monkeypatch.setattr(flex, "create_block_mask", flex._compiled_mask())
    monkeypatch.setattr(flex, "flex_attention", flex._compiled_attention())
    shapes = ((1, 256, 200), (2, 384, 300), (4, 200, 100), (1, 512, 400), (2, 130, 1), (1, 7, 1))
    steps = 0
    for trains, (B, T, M), heads in product((True, False), shapes, ((4, 2), (3, 1))):
        segments = torch.arange(T).div(50, rounding_mode="floor").repeat(B, 1)
        queries = PackedQueries(segments, torch.arange(M).repeat(B, 1))
        query = torch.zeros(B, heads[0], M, 16)
        keys = torch.zeros(B, heads[1], T, 16)
        with torch.set_grad_enabled(trains):
            flex.attend_context(query, keys, keys, flex.block_mask(queries), 0.3)
        steps += 1
    kernels.compiled.cache_clear()
    assert len(calls) == 2 * steps
    assert len(set(calls)) < kernels.MOST_GRAPHS / 2


def test_gpu_without_kernels_goes_row_by_row_and_logs_the_reason(claimed_gpu, caplog):
    kernels.log_once.cache_clear()
    keys = torch.zeros(1, 1, 4, 16, device="cuda")
    queries = PackedQueries(torch.zeros(1, 4, dtype=torch.long, device="cuda"))
    for _ in range(2):
        attention(keys, (keys, keys), (), queries, 1.0)
    (message,) = caplog.messages
    assert message.startswith("attention") and message.endswith("torch has no CUDA device")


def test_inputs_that_the_kernels_do_not_support_have_a_reason():
    narrow, wide = torch.zeros(1, 1, 4, 8), torch.zeros(1, 1, 4, 16)
    assert flex.unsupported_inputs(wide, wide) is None
    assert "head_dim is 8" in flex.unsupported_inputs(narrow, narrow)
    assert "head_dim is 8" in flex.unsupported_inputs(wide, narrow)
    assert "float64" in flex.unsupported_inputs(wide.double(), wide.double())
