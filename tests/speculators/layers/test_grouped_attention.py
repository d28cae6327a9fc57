"""Grouped attention says what the usual one says, wherever it steps in; elsewhere it stays out of
the way."""

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
def test_a_target_decodes_as_it_reads_at_once(tiny_model, architecture, monkeypatch):
    """Rows of different lengths and several new tokens, over a cache: the states of one forward
    over the whole row."""
    calls = []
    plain = grouped.grouped_attention

    def counted(*args, **kwargs):
        calls.append(args[1].shape)
        return plain(*args, **kwargs)

    monkeypatch.setitem(grouped.AttentionInterface._global_mapping, grouped.NAME, counted)
    target = FrozenTarget(tiny_model(architecture), [1])
    target.model.set_attn_implementation("sdpa")
    ids = torch.randint(3, 100, (2, 12), generator=torch.Generator().manual_seed(0))
    whole = target(ids)[1]
    cache = RaggedCache(2, 16)
    for row, length in enumerate((6, 4)):
        target(
            ids[row : row + 1, :length],
            cache.position_ids(row, row + 1, length),
            None,
            cache.view(row, row + 1, length),
        )
        cache.advance(row, length)
    new = torch.stack([ids[0, 6:9], ids[1, 4:7]])
    _, states = target(new, cache.position_ids(0, 2, 3), cache.mask(0, 2, 3), cache.view(0, 2, 3))
    torch.testing.assert_close(states[0], whole[0, 6:9], atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(states[1], whole[1, 4:7], atol=2e-5, rtol=1e-4)
    assert bool(calls) == (
        architecture in SHARING
    )  # Falcon's layers have their own attention, for "sdpa" alone
    assert target.config._attn_implementation == "sdpa"


def test_on_cuda_no_mask_repeats_keys_and_values(monkeypatch, claimed_gpu):
    """However many new tokens there are."""
    monkeypatch.setattr(grouped, "sdpa_attention_forward", lambda *_: pytest.fail("repeated"))
    T = grouped.MOST_QUERIES + 2
    given = [x.to("cuda") for x in tensors(T, S=T + 9)]
    mask = torch.zeros(3, 1, T, T + 9).to("cuda")
    assert grouped.grouped_attention(Module(), *given, mask)[0].shape == (3, T, 4, 8)


def test_anything_it_does_not_know_is_left_to_sdpa(monkeypatch):
    monkeypatch.setattr(grouped, "sdpa_attention_forward", lambda *args, **kwargs: kwargs)
    handed = grouped.grouped_attention(Module(), *tensors(1), None, scaling=0.3, softcap=30.0)
    assert handed["softcap"] == 30.0
