"""The sizes and rotary parameters that a head takes from its target, whatever they are called
there, and what no head can be made of."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import DeepseekV3Config

from draftsmith.speculators.config import rope_of, with_factors_for
from draftsmith.speculators.errors import ConfigError
from draftsmith.speculators.registry import build_config, config_for_target, family_class
from draftsmith.speculators.target.frozen_target import FrozenTarget
from tests.support.errors import raises_at
from tests.support.models import make_tiny_model

TAPS = {"tap_layers": [1, 2, 3]}
# Their own names of the sizes; the width of the MLP.
RENAMED = {
    "gpt2": (dict(n_embd=32, n_head=4, n_layer=3), 128),
    "gptj": (dict(n_embd=32, n_head=4, n_layer=3, rotary_dim=4, n_inner=64), 64),
    "opt": (dict(ffn_dim=40, word_embed_proj_dim=32), 40),
    "bloom": (dict(n_head=4, n_layer=3), 128),
}
FACTORS = [1.0, 1.5, 2.0, 4.0]


def longrope(factors: list[float]) -> dict:
    return dict(rope_type="longrope", rope_theta=1e4, short_factor=factors, long_factor=factors)


@pytest.mark.parametrize("name", RENAMED)
def test_config_for_target_reads_sizes_under_their_names(name):
    sizes, width = RENAMED[name]
    target = FrozenTarget(make_tiny_model(name, intermediate_size=None, **sizes), [1, 2, 3])
    config = config_for_target(target, "eagle3", **TAPS)
    assert (config.num_attention_heads, config.head_dim) == (4, 8)
    assert config.intermediate_size == width
    family_class("eagle3")(config).attach(target)


def test_config_for_target_without_attention_asks_for_heads():
    without = dict(num_attention_heads=None, num_key_value_heads=None)
    target = FrozenTarget(make_tiny_model("mamba", **without), [1, 2, 3])
    with raises_at(ConfigError, "drafter.num_attention_heads"):
        config_for_target(target, "eagle3", **TAPS)
    config = config_for_target(target, "eagle3", num_attention_heads=2, **TAPS)
    assert (config.num_key_value_heads, config.head_dim) == (2, 16)


def test_config_for_target_of_an_odd_head_dim_is_refused():
    target = FrozenTarget(make_tiny_model("llama"), [1, 2, 3])
    with pytest.raises(ConfigError, match="head_dim"):
        config_for_target(target, "eagle3", head_dim=7, **TAPS)


@pytest.mark.parametrize("head_dim", [6, 8, 12, 16])
def test_with_factors_for_gives_each_frequency_its_factor(head_dim):
    """At a pair of the head that turns as a pair of the target does."""
    factors = with_factors_for(longrope(FACTORS), head_dim)["long_factor"]
    pairs = head_dim // 2
    assert len(factors) == pairs
    for i, factor in enumerate(factors):
        at = i * len(FACTORS) / pairs
        if at.is_integer():
            assert factor == pytest.approx(FACTORS[int(at)])
    assert factors == sorted(factors)


def test_a_head_of_a_target_that_turns_a_part_of_each_head_runs():
    """As Phi-4-mini: factors of three of the four pairs."""
    rope = longrope([1.0, 2.0, 4.0]) | dict(partial_rotary_factor=0.75)
    sizes = dict(original_max_position_embeddings=64, partial_rotary_factor=0.75)
    target = FrozenTarget(make_tiny_model("phi3", rope_parameters=rope, **sizes), [1, 2, 3])
    config = config_for_target(target, "eagle3", **TAPS)
    assert config.rope_parameters["original_max_position_embeddings"] == 64
    cos, _ = family_class("eagle3")(config).positions(torch.zeros(1), torch.arange(4)[None])
    assert cos.shape == (1, 4, config.head_dim)
    with pytest.raises(ConfigError, match="factor"):
        build_config("x", **config.model_dump() | {"rope_parameters": rope_of(target.config)})


def test_rope_of_latent_attention_scales_as_plain_yarn_does():
    scales = dict(mscale=1.0, mscale_all_dim=1.0, original_max_position_embeddings=64)
    rope = dict(rope_type="yarn", rope_theta=1e4, factor=40.0, **scales)
    target = FrozenTarget(make_tiny_model("llama"), [1, 2, 3])
    kept = rope_of(DeepseekV3Config(rope_parameters=rope))
    config = config_for_target(target, "eagle3", rope_parameters=kept, **TAPS)
    rotary = family_class("eagle3")(config).positions.rotary_emb
    assert rotary.attention_scaling == pytest.approx(0.1 * math.log(40.0) + 1)
