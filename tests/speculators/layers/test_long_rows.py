"""Long rows: attention text by text and activations computed again give what masks and kept
activations give."""

from __future__ import annotations

import pytest
import torch

from draftsmith.speculators.layers import attention
from draftsmith.speculators.target import frozen_target as target_module
from draftsmith.speculators.target import packed_attention
from draftsmith.speculators.target.frozen_target import FrozenTarget
from draftsmith.speculators.target.packed_attention import text_spans
from tests.support.cases import BASE, CASES, make

ARCHITECTURES = ["llama", "mistral", "gemma3", "deepseek_v3"]


def batch(vocab: int, T: int = 40) -> dict[str, torch.Tensor]:
    """Two rows of several texts, the second with padding behind."""
    generator = torch.Generator().manual_seed(0)
    lengths = [[7, 1, 20, 12], [25, 9]]
    segments = torch.full((2, T), -1)
    positions = torch.zeros(2, T, dtype=torch.long)
    for row, texts in enumerate(lengths):
        start = 0
        for number, length in enumerate(texts):
            segments[row, start : start + length] = number
            positions[row, start : start + length] = torch.arange(length)
            start += length
    ids = torch.randint(3, vocab, (2, T), generator=generator)
    mask = (torch.rand(2, T, generator=generator) < 0.7) & (segments >= 0)
    return {"input_ids": ids, "position_ids": positions, "segment_ids": segments, "loss_mask": mask}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_text_by_text_is_what_masks_say(tiny_model, monkeypatch, name):
    target = FrozenTarget(tiny_model(name, initializer_range=0.15), [0, 1, 3])
    rows = batch(target.vocab_size)
    usual = target.features(**rows)
    monkeypatch.setattr(target_module, "LONG_ROW", 1)
    monkeypatch.setattr(packed_attention, "WINDOW_BLOCK", 5)
    monkeypatch.setattr(target_module, "packed_mask", lambda *_: pytest.fail("a mask"))
    features = target.features(**rows)
    kept = rows["segment_ids"] >= 0
    for name in ("taps", "last_hidden"):
        a, b = getattr(features, name)[kept], getattr(usual, name)[kept]
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_spans_are_of_texts_that_are_whole():
    segments = torch.tensor([[0, 0, 1, 2, 2, -1]])
    assert text_spans(segments) == [[(0, 2), (2, 3), (3, 5), (5, 6)]]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*BASE.values(), "eagle3, two layers, window"])
def test_activations_computed_again_give_the_same_gradients(tiny_model, monkeypatch, name):
    monkeypatch.setattr(attention, "SCORES", 4)
    gradients = []
    for recomputes in (False, True):
        target, drafter = make(CASES[name], tiny_model(CASES[name].architecture))
        drafter.requires_grad_(True)
        drafter.train().checkpoint_activations(recomputes)
        torch.manual_seed(0)
        features = target.features(**batch(target.vocab_size))
        steps = list(
            drafter.unroll(features, 3 if drafter.max_depth is None else drafter.max_depth)
        )
        sum((step.hidden.float() ** 2).sum() / 100 for step in steps).backward()
        gradients.append([p.grad for p in drafter.parameters()])
    assert any(g is not None and g.abs().max() > 0 for g in gradients[0])
    for a, b in zip(*gradients):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
