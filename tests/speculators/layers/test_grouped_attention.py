"""Grouped attention says what the usual one says, and stays out of the way elsewhere."""

from __future__ import annotations

import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from draftsmith.inference.kv_cache.ragged_cache import RaggedCache
from draftsmith.speculators.layers import grouped_attention as grouped
from draftsmith.speculators.target.frozen_target import FrozenTarget


class Module(torch.nn.Module):
    num_key_value_groups, is_causal, training = 2, True, False


def tensors(T: int, S: int = 12, B: int = 3):
    generator = torch.Generator().manual_seed(T)
    shapes = ((B, 4, T, 8), (B, 2, S, 8), (B, 2, S, 8))
    return [torch.randn(shape, generator=generator) for shape in shapes]


@pytest.mark.parametrize("T", [1, 5, grouped.MOST_QUERIES + 4])
@pytest.mark.parametrize("masked", [True, False])
def test_equals_sdpa(T, masked):
    query, key, value = tensors(T, S=T + 9)
    mask = None
    if masked:
        seen = torch.rand(3, 1, T, T + 9, generator=torch.Generator().manual_seed(1)) < 0.7
        seen[..., 0] = True
        mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    elif T > 1:
        key, value = key[:, :, :T], value[:, :, :T]  # causal over equal lengths
    expected, _ = sdpa_attention_forward(Module(), query, key, value, mask, scaling=0.3)
    output, weights = grouped.grouped_attention(Module(), query, key, value, mask, scaling=0.3)
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)
    assert weights is None


SHARING = ["llama", "qwen3_sliding", "gemma3", "mixtral"]


@pytest.mark.parametrize("architecture", [*SHARING, "falcon"])
def test_a_target_over_a_cache_attends_in_groups(tiny_model, architecture, monkeypatch):
    """Falcon's layers have their own attention, for "sdpa" alone."""
    calls = []

    def counted(*args, **kwargs):
        calls.append(args)
        return grouped.grouped_attention(*args, **kwargs)

    monkeypatch.setitem(grouped.AttentionInterface._global_mapping, grouped.NAME, counted)
    target, cache = FrozenTarget(tiny_model(architecture)), RaggedCache(2, 16)
    target.model.set_attn_implementation("sdpa")
    ids = torch.arange(3, 9).view(2, 3)
    whole = target(ids)[1]
    cached = target(ids, cache.position_ids(0, 2, 3), cache.mask(0, 2, 3), cache.view(0, 2, 3))[1]
    torch.testing.assert_close(cached, whole, atol=2e-5, rtol=1e-4)
    assert bool(calls) == (architecture in SHARING)
    assert target.config._attn_implementation == "sdpa"


def test_on_cuda_no_mask_repeats_keys_and_values(monkeypatch, claimed_gpu):
    monkeypatch.setattr(grouped, "sdpa_attention_forward", lambda *_: pytest.fail("repeated"))
    T = grouped.MOST_QUERIES + 2
    arguments = [x.to("cuda") for x in tensors(T, S=T + 9)]
    mask = torch.zeros(3, 1, T, T + 9).to("cuda")
    assert grouped.grouped_attention(Module(), *arguments, mask)[0].shape == (3, T, 4, 8)


def test_anything_it_does_not_know_is_left_to_sdpa(monkeypatch):
    monkeypatch.setattr(grouped, "sdpa_attention_forward", lambda *args, **kwargs: kwargs)
    handed = grouped.grouped_attention(Module(), *tensors(1), None, scaling=0.3, softcap=30.0)
    assert handed["softcap"] == 30.0
