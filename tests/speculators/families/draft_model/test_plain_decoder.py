"""Plain decoders run with few calls: the same states as transformers computes, over ragged rows, or not at all."""

from __future__ import annotations

import pytest
import torch

from inference.kv_cache.ragged_cache import RaggedCache
from speculators.families.draft_model.fast_decoder import plain_decoder
from speculators.target.frozen_target import FrozenTarget
from tests.conftest import ARCHITECTURES, make_tiny_model

PLAIN = {
    "llama": {},
    "llama, biases": {"attention_bias": True},
    "llama, scaled positions": {
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
        }
    },
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {},
    "qwen3, one key head": {"num_key_value_heads": 1},
}  # fmt: skip


def states(run, cache: RaggedCache, pieces: list[list[list[int]]]) -> list[torch.Tensor]:
    """`run` over rows that grow by the pieces, each [rows][tokens], of unequal lengths: the states of real tokens."""
    found = []
    for piece in pieces:
        width, rows = max(map(len, piece)), len(piece)
        ids = torch.tensor([tokens + [0] * (width - len(tokens)) for tokens in piece])
        places, mask = cache.position_ids(0, rows, width), cache.mask(0, rows, width)
        out = run(ids, places, mask, cache.view(0, rows, width))[1]
        for row, tokens in enumerate(piece):
            cache.advance(row, len(tokens))
            found.append(out[row, : len(tokens)])
    return found


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("inference_mode", [False, True])
def test_states_are_those_of_the_model(name: str, inference_mode: bool) -> None:
    runner = FrozenTarget(make_tiny_model(name.split(",")[0], **PLAIN[name]))
    plain = plain_decoder(runner)
    assert plain is not None
    pieces = [[[5, 9, 11, 42, 7], [90, 33]], [[8], [61]], [[20, 3, 4], [17, 2, 9]], [[50], [60]]]
    with torch.inference_mode(inference_mode), torch.no_grad():
        wanted = states(runner, RaggedCache(2, 64), pieces)
        found = states(plain, RaggedCache(2, 64), pieces)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("name", sorted(set(ARCHITECTURES) - {"llama", "qwen2", "qwen3"}))
def test_other_architectures_run_as_they_are(name: str) -> None:
    assert plain_decoder(FrozenTarget(make_tiny_model(name))) is None


def test_a_model_that_computes_something_else_runs_as_it_is() -> None:
    model = make_tiny_model("llama")
    attention = model.model.layers[1].self_attn
    attention.forward = lambda *args, run=attention.forward, **kwargs: (run(*args, **kwargs)[0] * 1.5, None)
    assert plain_decoder(FrozenTarget(model)) is None


def test_in_bfloat16_they_agree_within_its_precision() -> None:
    assert plain_decoder(FrozenTarget(make_tiny_model("qwen3").bfloat16())) is not None
