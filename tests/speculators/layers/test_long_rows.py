"""Packed rows without masks of their length: text by text, and by a kernel for all texts, as with
masks; activations computed again as if kept."""

from __future__ import annotations

import pytest
import torch

from draftsmith.speculators.layers import attention, flex_attention
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
    usual = target.features(**packed(*ROWS))
    monkeypatch.setattr(packed_attention, "WINDOW_BLOCK", 5)
    assert_same_without_masks(target, usual, monkeypatch)


def assert_same_without_masks(target, usual, monkeypatch):
    monkeypatch.setattr(target_module, "LONG_ROW", 1)
    monkeypatch.setattr(target_module, "packed_mask", lambda *_: pytest.fail("a mask"))
    rows = packed(*ROWS)
    features = target.features(**rows)
    kept = rows["segment_ids"] >= 0
    for name in ("taps", "last_hidden"):
        a, b = getattr(features, name)[kept], getattr(usual, name)[kept]
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def dense_varlen(query, key, value, begins, _, longest, __, *, scale, window_size, enable_gqa):
    """torch's varlen_attn, which has no kernel on a CPU: [tokens, heads, d], all scores."""
    assert longest == begins.diff().max()
    slots = torch.arange(len(query))
    texts = torch.searchsorted(begins, slots, right=True)
    before, after = window_size
    behind = slots[:, None] - slots
    seen = (texts[:, None] == texts) & (behind >= -after)
    if before >= 0:
        seen &= behind <= before
    q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
    attend = torch.nn.functional.scaled_dot_product_attention
    return attend(q, k, v, seen, scale=scale, enable_gqa=enable_gqa)[0].transpose(0, 1)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
def test_one_varlen_kernel_for_all_texts_is_what_masks_say(tiny_model, monkeypatch, name):
    target = FrozenTarget(tiny_model(name, initializer_range=0.15), [0, 1, 3])
    usual = target.features(**packed(*ROWS))
    monkeypatch.setattr(packed_attention, "varlen_serves", lambda query, value: True)
    monkeypatch.setattr(packed_attention, "varlen_attn", dense_varlen)
    monkeypatch.setattr(packed_attention, "_text_by_text", lambda *_: pytest.fail("the walk"))
    assert_same_without_masks(target, usual, monkeypatch)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_flex_attention_under_a_mask_of_documents_is_what_masks_say(tiny_model, monkeypatch, name):
    """Values of another width than keys included (deepseek_v3)."""
    target = FrozenTarget(tiny_model(name, initializer_range=0.15), [0, 1, 3])
    usual = target.features(**packed(*ROWS))
    monkeypatch.setattr(flex_attention, "serves", lambda query, value: True)
    monkeypatch.setattr(packed_attention, "_text_by_text", lambda *_: pytest.fail("the walk"))
    assert_same_without_masks(target, usual, monkeypatch)


@pytest.mark.skipif(torch.__version__ < "2.12", reason="varlen_attn has not all of its arguments")
def test_varlen_attention_is_of_half_precision_on_a_gpu_and_can_be_left_out(monkeypatch):
    cuda = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert packed_attention.has_varlen(cuda, torch.bfloat16)
    assert not packed_attention.has_varlen(cuda, torch.float32)
    assert not packed_attention.has_varlen(torch.device("cpu"), torch.bfloat16)
    monkeypatch.setenv("DRAFTSMITH_KERNELS", "none")
    assert not packed_attention.has_varlen(cuda, torch.bfloat16)


@pytest.mark.slow
@pytest.mark.filterwarnings("error::FutureWarning")
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
