"""RaggedCache: whatever was written, rolled back and moved, every row reads as if it had been
computed alone."""

from __future__ import annotations

import random

import pytest
import torch

from draftsmith.inference.kv_cache import ragged_cache
from draftsmith.inference.kv_cache.ragged_cache import RaggedCache
from draftsmith.inference.kv_cache.static_rows import StaticRows
from draftsmith.speculators.errors import ConfigError
from draftsmith.speculators.target.frozen_target import FrozenTarget
from tests.support.errors import raises_at

ROWS = 4


@pytest.fixture(autouse=True)
def _memory_grows(monkeypatch):
    monkeypatch.setattr(ragged_cache, "INITIAL_CAPACITY", 4)


def alone(target: FrozenTarget, tokens: list[int]) -> torch.Tensor:
    """last_hidden [len, H] of one fresh forward by the model itself, without our masks or cache."""
    with torch.no_grad():
        decoder = target.model.get_decoder()
        return decoder(input_ids=torch.tensor([tokens]), use_cache=False).last_hidden_state[0]


def step(target, cache, start, stop, ids):
    """Runs ids [b, T] on rows [start, stop); returns last_hidden [b, T, H]. Lengths do not move."""
    T = ids.shape[1]
    positions, mask = cache.position_ids(start, stop, T), cache.mask(start, stop, T)
    return target(ids, positions, mask, cache.view(start, stop, T))[1]


def check(actual, expected):
    assert (actual - expected).abs().max() <= 1e-5 * max(1.0, expected.abs().max().item())


@pytest.mark.slow
def test_chunks_raggedness_and_rollback_equal_a_fresh_forward(tiny_model, any_architecture):
    """Random rounds: prefill in chunks, drafts kept in part, over random contiguous row ranges,
    growing on the way."""
    target = FrozenTarget(tiny_model(any_architecture))
    cache = RaggedCache(ROWS, max_len=40)
    rng, texts = random.Random(0), [[] for _ in range(ROWS)]
    for _ in range(14):
        start = rng.randrange(ROWS)
        stop = rng.randint(start + 1, ROWS)
        T = rng.choice([1, 1, 2, 5])
        if max(len(texts[row]) for row in range(start, stop)) + T > 30:
            continue
        new = [[rng.randrange(3, 101) for _ in range(T)] for _ in range(start, stop)]
        hidden = step(target, cache, start, stop, torch.tensor(new))
        for i, row in enumerate(range(start, stop)):
            check(hidden[i], alone(target, texts[row] + new[i])[len(texts[row]) :])
            kept = rng.randint(0, T)
            cache.advance(row, kept)
            texts[row] += new[i][:kept]
            if rng.random() < 0.2:
                texts[row] = texts[row][: rng.randint(0, len(texts[row]))]
                cache.truncate(row, len(texts[row]))
        assert cache.lengths == [len(text) for text in texts]


def test_move_and_reset(tiny_model):
    target, cache = FrozenTarget(tiny_model("gemma3")), RaggedCache(3, 32)
    texts = [[5, 6, 7], [8, 9, 10, 11, 12, 13], [14]]
    for row, tokens in enumerate(texts):
        step(target, cache, row, row + 1, torch.tensor([tokens]))
        cache.advance(row, len(tokens))
    cache.reset(0)
    cache.move(1, 0)
    cache.move(2, 1)
    assert cache.lengths == [6, 1, 0]
    hidden = step(target, cache, 0, 3, torch.tensor([[20, 21], [22, 23], [24, 25]]))
    for row, tokens in enumerate([texts[1] + [20, 21], texts[2] + [22, 23], [24, 25]]):
        check(hidden[row], alone(target, tokens)[-2:])


def test_the_cache_outlives_inference_mode(tiny_model):
    target, cache = FrozenTarget(tiny_model("llama")), RaggedCache(2, 32)
    with torch.inference_mode():
        step(target, cache, 0, 1, torch.tensor([[5, 6, 7]]))
        cache.advance(0, 3)
    hidden = step(target, cache, 0, 2, torch.tensor([[8, 9], [10, 11]]))
    check(hidden[0], alone(target, [5, 6, 7, 8, 9])[-2:])


def write(cache, start, stop, T, value):
    """A layer's update with keys = value, values = -value; returns what attention would read."""
    key = torch.full((stop - start, 2, T, 3), float(value))
    return cache.view(start, stop, T).update(key, -key, 0)


def test_reads_are_views_and_growth_keeps_what_was_written():
    cache = RaggedCache(2, max_len=12)
    keys, values = write(cache, 0, 1, 3, 1)
    assert keys.shape == (1, 2, 3, 3)
    assert keys.untyped_storage().nbytes() == 2 * 2 * 4 * 3 * 4  # no copy
    assert cache.bytes() == 2 * (2 * 2 * 4 * 3) * 4
    cache.advance(0, 3)
    keys, values = write(cache, 0, 2, 2, 7)
    assert cache.capacity == 8 and cache.bytes() == 2 * (2 * 2 * 8 * 3) * 4
    assert keys[0, 0, :, 0].tolist() == [1, 1, 1, 7, 7] and values[1, 1, :2, 2].tolist() == [-7, -7]
    cache.advance(0, 2)
    assert cache.position_ids(0, 1, 7).max() < cache.capacity  # of which rotary tables are made
    write(cache, 0, 1, 7, 3)
    assert cache.capacity == 12
    with raises_at(ConfigError, "RaggedCache"):
        cache.view(0, 2, 8)
    assert cache.lengths == [5, 0]


def test_growth_that_runs_out_of_memory_leaves_the_cache_usable(monkeypatch):
    cache = RaggedCache(1, max_len=12)
    for layer in (0, 1):
        key = torch.full((1, 1, 3, 2), float(layer))
        cache.view(0, 1, 3).update(key, -key, layer)
    cache.advance(0, 3)
    allocations = []

    def full_at_the_third(*args, zeros=torch.zeros, **kwargs):
        allocations.append(args)
        if len(allocations) == 3:
            raise torch.OutOfMemoryError
        return zeros(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "zeros", full_at_the_third)
        with pytest.raises(torch.OutOfMemoryError):
            cache.view(0, 1, 2)
    assert cache.capacity == 4 and cache.lengths == [3]
    view = cache.view(0, 1, 2)
    for layer in (0, 1):
        new = torch.full((1, 1, 2, 2), 7.0)
        keys, values = view.update(new, -new, layer)
        assert keys[0, 0, :, 0].tolist() == [layer] * 3 + [7, 7]
        assert values[0, 0, :, 0].tolist() == [-layer] * 3 + [-7, -7]
    assert cache.capacity == 8


def test_mistakes_are_refused():
    cache = RaggedCache(2, max_len=8)
    keys = torch.zeros(1, 1, 3, 2)
    for mistake, where in (
        (lambda: cache.truncate(0, 1), "RaggedCache.truncate"),
        (lambda: cache.advance(0, 9), "RaggedCache"),
        (lambda: cache.advance(0, -1), "RaggedCache"),
        (lambda: cache.view(0, 1, 2).update(keys, keys, 0), "RaggedView"),
        (lambda: cache.reserve(0, 2, 9), "RaggedCache"),
    ):
        with raises_at(ConfigError, where):
            mistake()


def test_keep_closes_up_what_was_accepted():
    cache = RaggedCache(2, 32)
    for start, count in ((0, 3), (3, 5)):
        view = cache.view(0, 2, count)
        numbers = torch.arange(start, start + count, dtype=torch.float32)
        states = (
            numbers[None, None, :, None].expand(2, 1, -1, 2)
            + 100 * torch.arange(2)[:, None, None, None]
        )
        view.update(states, -states, 0)
        if start == 0:
            for row in range(2):
                cache.advance(row, 3)
    cache.keep([[0, 2, 4], [0]])
    assert cache.lengths == [6, 4]
    assert cache.keys_of(0, 0, 2)[0, 0, :6, 0].tolist() == [0, 1, 2, 3, 5, 7]
    assert cache.memory()[1][0][1, 0, :4, 1].tolist() == [-100, -101, -102, -103]


def test_a_tree_sees_the_text_and_its_ancestors():
    cache = RaggedCache(3, 32)
    cache.reserve_all()
    cache.advance(2, 9)  # a row that is not asked for
    cache.advance(0, 3)
    cache.advance(1, 1)
    visible = (
        torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]])
        .bool()
        .expand(2, -1, -1)
    )
    mask, index = cache.tree_mask(0, 2, [3, 1], visible)
    assert mask.shape == (2, 1, 4, 7) and index.tolist()[1] == [-1, 0, 1, 2, 3, 4, 5]
    assert mask[0, 0].int().tolist() == [[1, 1, 1, *row] for row in visible[0].int().tolist()]
    assert mask[1, 0].int().tolist() == [[1, *row, 0, 0] for row in visible[0].int().tolist()]
    keys = [torch.zeros(2, 1, 32, 1)]
    static = StaticRows(torch.tensor([3, 1]), keys, keys, 4, 7)
    same = static.tree_mask(0, 2, static.lengths, visible)
    assert torch.equal(same[0], mask) and torch.equal(same[1], index)
    no_text = torch.zeros(2, dtype=torch.long)
    blind = static.tree_mask(0, 2, no_text, torch.zeros_like(visible))[0]
    assert blind.any(-1).all()  # padding that saw nothing would give NaN
    # half of the tree is written already: two new tokens after two drafts
    cache.advance(0, 2)
    cache.advance(1, 2)
    later, _ = cache.tree_mask(0, 2, [3, 1], visible[:, 2:])
    assert torch.equal(later, mask[:, :, 2:])
