"""Every family of drafters, small and random: what the contract tests run over. A new family adds a
case here, and one for each switch that changes its maths or its files."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from speculators.drafter import Drafter
from speculators.registry import config_for_target, family_class
from speculators.target.frozen_target import FrozenTarget

OPT = {
    "hidden_size": 24,
    "ffn_dim": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "word_embed_proj_dim": 24,
    "max_position_embeddings": 256,
    "init_std": 0.2,
    "dropout": 0.0,
}


@dataclass(frozen=True)
class Case:
    """One drafter: `shape` are fields of its config, `options` keys of its recipes."""

    family: str
    shape: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    architecture: str = "llama"
    taps: tuple[int, ...] = ()
    # on every parameter; less where no norm keeps states at a size that float32 compares well at
    noise: float = 0.3


CASES: dict[str, Case] = {
    "dflash": Case(
        "dflash",
        {"num_layers": 2, "block_size": 5, "mask_token_id": 100},
        {"block_size": 5},
        taps=(1, 2),
    ),
    "dflash, causal, window, reduced, qwen3": Case(
        "dflash",
        {
            "num_layers": 1,
            "block_size": 6,
            "mask_token_id": 100,
            "is_causal": True,
            "sliding_window": 4,
            "draft_vocab_size": 40,
        },
        {"block_size": 6, "is_causal": True},
        "qwen3",
        (1, 3),
    ),
    "dspark": Case(
        "dspark",
        {"num_layers": 2, "block_size": 4, "mask_token_id": 100, "markov_rank": 8},
        {"block_size": 4},
        taps=(1, 2),
        noise=0.2,
    ),
    "dspark, gated, fill in, reduced": Case(
        "dspark",
        {
            "num_layers": 1,
            "block_size": 5,
            "mask_token_id": 100,
            "markov_rank": 8,
            "markov_head_type": "gated",
            "sample_from_anchor": False,
            "draft_vocab_size": 40,
        },
        {"block_size": 5, "sample_from_anchor": False},
        taps=(2,),
    ),
    "dspark, rnn, no confidence, qwen3": Case(
        "dspark",
        {
            "num_layers": 1,
            "block_size": 4,
            "mask_token_id": 100,
            "markov_rank": 8,
            "markov_head_type": "rnn",
            "enable_confidence_head": False,
        },
        {"block_size": 4},
        "qwen3",
        (1, 2),
    ),
    "dspark, causal, window, gemma3": Case(
        "dspark",
        {
            "num_layers": 2,
            "block_size": 4,
            "mask_token_id": 100,
            "markov_rank": 8,
            "is_causal": True,
            "sliding_window": 6,
            "confidence_head_with_markov": False,
        },
        {"block_size": 4, "is_causal": True},
        "gemma3",
        (2,),
    ),
    "dflash2": Case(
        "dflash2",
        {
            "num_layers": 2,
            "block_size": 5,
            "mask_token_id": 100,
            "conv_group_size": 8,
            "selector_rank": 8,
            "selector_top_k": 6,
        },
        {"block_size": 5},
        taps=(1, 2),
    ),
    "draft_model, cut": Case("draft_model", options={"from_target": {"last": 2}}, noise=0.05),
    "draft_model, cut, sliding windows": Case(
        "draft_model", options={"from_target": [0, 1]}, architecture="gemma3", noise=0.05
    ),
    "draft_model, another architecture": Case(
        "draft_model",
        options={"config": {"model_type": "opt", **OPT}},
        architecture="qwen2",
        noise=0.1,
    ),
    "eagle": Case("eagle", options={"init": "pass_through"}, noise=0.12),
    "eagle, HASS, gemma3": Case(
        "eagle", options={"unroll_steps": 3, "detach": True}, architecture="gemma3", noise=0.12
    ),
    "eagle, two layers, own embeddings, biases": Case(
        "eagle",
        {"num_layers": 2, "own_embeddings": True, "fc_bias": True, "attention_bias": True},
        {"own_embeddings": True, "fc_bias": True, "feature_noise": 0.0},
        architecture="qwen3",
        noise=0.12,
    ),
    "eagle3": Case("eagle3", {"draft_vocab_size": 40}, taps=(1, 2, 3)),
    "eagle3, two taps": Case("eagle3", {"draft_vocab_size": 40}, taps=(1, 2)),
    "eagle3, whole vocabulary, gemma3": Case("eagle3", architecture="gemma3", taps=(0, 3)),
    "eagle3, two layers": Case("eagle3", {"num_layers": 2, "draft_vocab_size": 40}, taps=(1, 2, 3)),
    "eagle3, 3.1 fc_norm, qwen3": Case(
        "eagle3", {"fc_norm": True, "norm_output": True}, {}, "qwen3", (1, 2, 3)
    ),
    "eagle3, 3.1 norm_before_fc": Case(
        "eagle3",
        {"norm_before_fc": True, "norm_before_residual": True},
        architecture="gemma3",
        taps=(1, 2, 3),
    ),
    "eagle3, two layers, window": Case(
        "eagle3", {"num_layers": 2, "sliding_window": 3}, {}, "qwen3", (2,)
    ),
    "eagle3, qk_norm": Case("eagle3", {"qk_norm": True, "draft_vocab_size": 40}, taps=(1, 2, 3)),
    "eagle3, own embeddings, four taps": Case(
        "eagle3", {"own_embeddings": True}, {"own_embeddings": True}, "qwen3", (0, 1, 2, 3)
    ),
    "medusa": Case("medusa", {"num_heads": 3}),
    "medusa, two blocks, no bias": Case(
        "medusa", {"num_heads": 4, "num_layers": 2, "fc_bias": False}, architecture="qwen3"
    ),
    "medusa, one projection": Case(
        "medusa", {"num_heads": 3, "shared_lm_head": True}, architecture="qwen2"
    ),
    "mlp": Case("mlp", options={"unroll_steps": 3}),
    "mlp, four heads, tied, scaled, gemma3": Case(
        "mlp",
        {"n_predict": 4, "inner_dim": 24, "tie_weights": True, "scale_input": True},
        {"n_predict": 4, "unroll_steps": 4},
        architecture="gemma3",
    ),
    "peagle": Case(
        "peagle",
        {"num_depths": 5, "mask_token_id": 100, "draft_vocab_size": 40},
        {"own_embeddings": False},
        taps=(1, 2, 3),
    ),
    "peagle, window": Case(
        "peagle",
        {"num_depths": 4, "mask_token_id": 100, "sliding_window": 5},
        {"own_embeddings": False},
        taps=(1, 2),
    ),
    "peagle, two layers, own embeddings, fc_norm": Case(
        "peagle",
        {
            "num_depths": 4,
            "mask_token_id": 100,
            "num_layers": 2,
            "own_embeddings": True,
            "fc_norm": True,
        },
        {},
        "qwen3",
        (1, 2),
    ),
    "mtp": Case("mtp"),
    "mtp, the state before the norm, qwen3": Case(
        "mtp", {"hidden_state": "residual"}, {}, "qwen3", (3,)
    ),
    "mtp, layer of deepseek_v3": Case("mtp", architecture="deepseek_v3"),
}


def make(case: Case, model: Any, *, noise: float | None = None) -> tuple[FrozenTarget, Drafter]:
    """The target and a drafter with every parameter random, attached and in evaluation mode."""
    target = FrozenTarget(model, case.taps)
    family = family_class(case.family)
    shape = case.shape
    if case.family == "draft_model":  # its options alone say what it is
        shape = family.options.model_validate(case.options).shape({}, target)
    config = config_for_target(target, case.family, tap_layers=case.taps or None, **shape)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        drafter = family(config).attach(target)
        for parameter in drafter.parameters():
            parameter.data += (case.noise if noise is None else noise) * torch.randn_like(parameter)
        if drafter.draft_to_target is not None:
            ids = torch.randperm(config.vocab_size)[: config.draft_vocab_size].sort().values
            drafter.draft_to_target.copy_(ids)
    return target, drafter.eval()


# The first case of each family; the others are for properties that a switch may break.
BASE = {case.family: name for name, case in reversed(CASES.items())}


@pytest.fixture(params=BASE.values(), ids=BASE.values())
def case(request) -> Case:
    """A case of each family in turn."""
    return CASES[request.param]


@pytest.fixture
def world(case, tiny_model) -> tuple[FrozenTarget, Drafter]:
    return make(case, tiny_model(case.architecture))


@pytest.fixture(params=CASES, ids=CASES)
def any_case(request) -> Case:
    """Every case in turn."""
    return CASES[request.param]


@pytest.fixture(scope="session")
def make_drafter():
    """The function `make(case, model, noise=None)`."""
    return make


@pytest.fixture(scope="session")
def case_of():
    """The function `case_of(family, shape)`: a case of one's own."""
    return Case


@pytest.fixture(scope="session")
def all_cases() -> dict[str, Case]:
    return CASES
