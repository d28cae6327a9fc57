"""Plain decoders run with few calls: taps and states as transformers computes them, over ragged
rows, or not at all."""

from __future__ import annotations

import logging
from functools import cache

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from draftsmith.inference.kv_cache.ragged_cache import RaggedCache
from draftsmith.inference.model_runner.plain_decoder import (
    PlainDecoder,
    plain_decoder,
    plain_or_none,
)
from draftsmith.speculators.layers import frozen_linear
from draftsmith.speculators.target.frozen_target import FrozenTarget
from tests.support.models import make_tiny_model

_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
PLAIN = {
    "llama": {},
    "llama, biases": {"attention_bias": True, "mlp_bias": True},
    "llama, scaled positions": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    },
    "mixtral": {},
    "qwen2": {},
    "qwen2_moe": {**_EXPERTS, "shared_expert_intermediate_size": 24},
    "qwen3": {},
}
TAPS = (0, 1, 3)
CLOSE = {"atol": 1e-4, "rtol": 1e-4}


@cache
def target_of(name: str) -> FrozenTarget:
    return FrozenTarget(make_tiny_model(name.split(",")[0], **PLAIN[name]), TAPS)


def features(run, cache: RaggedCache, pieces: list[list[list[int]]]) -> list[torch.Tensor]:
    """`run` over rows that grow by the pieces, each [rows][tokens], of unequal lengths: taps and
    states of real tokens."""
    outputs = []
    for piece in pieces:
        width, rows = max(map(len, piece)), len(piece)
        ids = torch.tensor([tokens + [0] * (width - len(tokens)) for tokens in piece])
        places, mask = cache.position_ids(0, rows, width), cache.mask(0, rows, width)
        out = torch.cat(run(ids, places, mask, cache.view(0, rows, width)), dim=-1)
        for row, tokens in enumerate(piece):
            cache.advance(row, len(tokens))
            outputs.append(out[row, : len(tokens)])
    return outputs


@pytest.mark.slow
@pytest.mark.parametrize("name", PLAIN)
def test_taps_and_states_are_those_of_the_model(name: str) -> None:
    target = target_of(name)
    long = [3 + 7 * i % 90 for i in range(20)]
    pieces = [
        [[5, 9, 11, 42, 7], [90, 33]],
        [[8], [61]],
        [long, long[::-1]],
        [[20, 3, 4], [17, 2, 9]],
        [[50], [60]],
    ]
    with torch.no_grad():
        expected = features(target, RaggedCache(2, 64), pieces)
        plain = plain_decoder(target)
        assert isinstance(plain, PlainDecoder)
        actual = features(plain, RaggedCache(2, 64), pieces)
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, **CLOSE)


# --------------------------------------------------------------- what runs as it is, and says why


@pytest.mark.parametrize("name", ["qwen3_sliding", "mistral", "gemma3", "falcon"])
def test_other_architectures_run_as_they_are(name: str) -> None:
    reason = "sliding window" if name in ("qwen3_sliding", "mistral") else "model_type"
    assert reason in plain_decoder(FrozenTarget(make_tiny_model(name)))


def _other_numbers(model) -> None:
    model.model.layers[1].post_attention_layernorm.variance_epsilon = 0.5


def _replaced(model) -> None:
    attention = model.model.layers[1].self_attn
    attention.forward = lambda *args, run=attention.forward, **kwargs: (
        run(*args, **kwargs)[0] * 1.5,
        None,
    )


def _quantised(model) -> None:
    class Int8Linear(nn.Linear):
        pass

    model.model.layers[2].mlp.up_proj = Int8Linear(32, 48, bias=False)


CHANGES = {
    "its layers compute something else": _other_numbers,
    "layers.1.self_attn has another forward": _replaced,
    "layer 2 has a Int8Linear": _quantised,
    "layers.0.mlp has a forward hook": (
        lambda model: model.model.layers[0].mlp.register_forward_hook(lambda *_: None)
    ),
    "attn_implementation is eager": lambda model: model.set_attn_implementation("eager"),
}


@pytest.mark.parametrize("reason", CHANGES)
def test_a_model_that_was_changed_runs_as_it_is_and_the_log_says_why(reason: str, caplog) -> None:
    model = make_tiny_model("llama")
    CHANGES[reason](model)
    with caplog.at_level(logging.INFO):
        assert plain_or_none(FrozenTarget(model)) is None
    assert f"decoding runs transformers' forward: {reason}" in caplog.text


# ---------------------------------------------------------------------- the weights


def test_weights_exist_once(tmp_path) -> None:
    target = FrozenTarget(make_tiny_model("qwen3"), TAPS)
    before = {name: weight.clone() for name, weight in target.model.state_dict().items()}
    first = plain_decoder(target)
    assert isinstance(first, PlainDecoder)
    attention = target.layers[0].self_attn
    storages = {
        getattr(attention, part).weight.untyped_storage().data_ptr()
        for part in ("q_proj", "k_proj", "v_proj")
    }
    assert len(storages) == 1
    weights = {
        weight.untyped_storage().data_ptr(): weight.untyped_storage().nbytes()
        for weight in target.parameters()
    }
    assert sum(weights.values()) == sum(weight.nbytes for weight in target.parameters())

    save_file(target.model.state_dict(), tmp_path / "model.safetensors")
    saved = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(saved[name], weight) for name, weight in before.items())

    plain_decoder(target)  # as by a second engine: nothing is moved
    assert {
        getattr(attention, part).weight.untyped_storage().data_ptr()
        for part in ("q_proj", "k_proj")
    } == storages


needs_packing = pytest.mark.skipif(
    not frozen_linear.can_pack(torch.zeros(1, dtype=torch.bfloat16)),
    reason="no packed bfloat16 products on this CPU",
)


@needs_packing
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_a_small_target_is_packed(name: str) -> None:
    target = FrozenTarget(make_tiny_model(name).bfloat16(), TAPS)
    forward, ids = plain_decoder(target), [[5, 9, 11], [42, 8, 3]]
    assert isinstance(forward.weights.head, frozen_linear.FrozenLinear)
    with torch.inference_mode():
        actual, expected = (
            features(run, RaggedCache(2, 64), [ids])[0] for run in (forward, target)
        )
        state = expected[..., -32:]
        pairs = (actual, expected), (forward.logits(state), target.logits(state))
        assert all((one - other).norm() < 0.03 * other.norm() for one, other in pairs)


@needs_packing
def test_weights_that_were_written_to_are_packed_again() -> None:
    model = make_tiny_model("qwen3").bfloat16()
    first = plain_decoder(FrozenTarget(model))
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight.mul_(2)
    second = plain_decoder(FrozenTarget(model))

    def packed(forward: PlainDecoder) -> list[torch.Tensor]:
        linears = [forward.weights.head]
        for layer in forward.weights.layers:
            attention, mlp = layer.self_attn, layer.mlp
            linears += [attention.fused, attention.o_proj, mlp.fused, mlp.down_proj]
        return [linear.packed for linear in linears]

    differing = [one is not other for one, other in zip(packed(first), packed(second), strict=True)]
    # the head, four of the first layer, then queries, keys and values of the second
    assert differing == [place == 5 for place in range(len(differing))]


def test_the_fast_form_is_made_once_per_model_until_its_weights_are_written_to() -> None:
    model = make_tiny_model("qwen3")
    first = plain_decoder(FrozenTarget(model))
    second = plain_decoder(FrozenTarget(model, TAPS))  # another engine's, which taps it
    assert second.weights is first.weights
    with torch.no_grad():
        model.model.layers[1].self_attn.q_norm.weight.mul_(2)
    third = plain_decoder(FrozenTarget(model, TAPS))
    assert third.weights is not first.weights
    ids = [[5, 9, 11], [42, 8, 3]]
    with torch.no_grad():
        actual, expected = (
            features(run, RaggedCache(2, 64), [ids])[0] for run in (third, third._runner)
        )
    torch.testing.assert_close(actual, expected, **CLOSE)
