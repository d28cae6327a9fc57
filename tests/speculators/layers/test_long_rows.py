"""Long rows: text by text as with masks, activations computed again as if kept."""

from __future__ import annotations

import pytest
import torch

from draftsmith.speculators.layers import attention
from draftsmith.speculators.target import frozen_target as target_module
from draftsmith.speculators.target import packed_attention
from draftsmith.speculators.target.frozen_target import FrozenTarget
from tests.support.cases import BASE, world_of
from tests.support.contract import packed

ARCHITECTURES = ["llama", "mistral", "gemma3", "deepseek_v3"]


ROWS = [7, 1, 20, 12], [25, 9]  # the second with padding behind


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_text_by_text_is_what_masks_say(tiny_model, monkeypatch, name):
    target = FrozenTarget(tiny_model(name, initializer_range=0.15), [0, 1, 3])
    rows = packed(*ROWS)
    usual = target.features(**rows)
    monkeypatch.setattr(target_module, "LONG_ROW", 1)
    monkeypatch.setattr(packed_attention, "WINDOW_BLOCK", 5)
    monkeypatch.setattr(target_module, "packed_mask", lambda *_: pytest.fail("a mask"))
    features = target.features(**rows)
    kept = rows["segment_ids"] >= 0
    for name in ("taps", "last_hidden"):
        a, b = getattr(features, name)[kept], getattr(usual, name)[kept]
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*BASE.values(), "eagle3, two layers, window"])
def test_activations_computed_again_give_the_same_gradients(monkeypatch, name):
    monkeypatch.setattr(attention, "SCORES", 4)
    gradients = []
    for recomputes in (False, True):
        target, drafter = world_of(name)
        drafter.requires_grad_(True)
        drafter.train().checkpoint_activations(recomputes)
        torch.manual_seed(0)
        features = target.features(**packed(*ROWS))
        steps = list(drafter.unroll(features, drafter.max_depth or 3))
        sum((step.hidden.float() ** 2).sum() / 100 for step in steps).backward()
        gradients.append([p.grad for p in drafter.parameters()])
    assert any(g is not None and g.abs().max() > 0 for g in gradients[0])
    for a, b in zip(*gradients):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
