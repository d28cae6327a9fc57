"""Every family of drafters, small and random: what the contract tests run over. A new family adds a
case here, and one for each switch that changes its maths or its files."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from draftsmith.speculators.drafter import Drafter
from draftsmith.speculators.families.draft_model.model import DraftModel, DraftModelOptions
from draftsmith.speculators.registry import config_for_target, family_class
from draftsmith.speculators.target.frozen_target import FrozenTarget
from tests.support.models import make_tiny_model

World = tuple[FrozenTarget, Drafter]
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
MASK = {"mask_token_id": 100}
REDUCED = {"draft_vocab_size": 40}
ONE = {"num_layers": 1}
TWO = {"num_layers": 2}
FIVE = {**MASK, "block_size": 5}
SPARK = {**MASK, "block_size": 4, "markov_rank": 8}
SELECTOR = {"conv_group_size": 8, "selector_rank": 8, "selector_top_k": 6}
CAUSAL = {"is_causal": True}
OWN = {"own_embeddings": True}
FILL_IN = {"sample_from_anchor": False}
BIASES = {"fc_bias": True, "attention_bias": True}


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


def _block(family: str, shape: dict, *arguments: Any, **more: Any) -> Case:
    """Its recipes say what changes the depths."""
    keys = ("block_size", "is_causal", "sample_from_anchor")
    return Case(family, shape, {k: v for k, v in shape.items() if k in keys}, *arguments, **more)


CASES: dict[str, Case] = {
    "dflash": _block("dflash", {**FIVE, **TWO}, taps=(1, 2)),
    "dflash, causal, window, reduced, qwen3": _block(
        "dflash",
        {**MASK, **ONE, "block_size": 6, **CAUSAL, "sliding_window": 4, **REDUCED},
        "qwen3",
        (1, 3),
    ),
    "dspark": _block("dspark", {**SPARK, **TWO}, taps=(1, 2), noise=0.2),
    "dspark, fill in, reduced": _block(
        "dspark", {**SPARK, **ONE, "block_size": 5, **FILL_IN, **REDUCED}, taps=(2,)
    ),
    "dspark, no confidence, qwen3": _block(
        "dspark", {**SPARK, **ONE, "enable_confidence_head": False}, "qwen3", (1, 2)
    ),
    "dspark, causal, window, gemma3": _block(
        "dspark",
        {**SPARK, **TWO, **CAUSAL, "sliding_window": 6, "confidence_head_with_markov": False},
        "gemma3",
        (2,),
    ),
    "dflash2": _block("dflash2", {**FIVE, **TWO, **SELECTOR}, taps=(1, 2)),
    "draft_model, cut": Case("draft_model", {}, {"from_target": {"last": 2}}, noise=0.05),
    "draft_model, cut, sliding windows": Case(
        "draft_model", {}, {"from_target": [0, 1]}, "gemma3", noise=0.05
    ),
    "draft_model, another architecture": Case(
        "draft_model", {}, {"config": {"model_type": "opt", **OPT}}, "qwen2", noise=0.1
    ),
    "draft_model, cut, reduced": Case(
        "draft_model", {}, {"from_target": {"last": 2}, **REDUCED}, noise=0.05
    ),
    "eagle": Case("eagle", {}, {"init": "pass_through"}, noise=0.12),
    "eagle, reduced": Case("eagle", REDUCED, {"init": "pass_through"}, noise=0.12),
    "eagle, HASS, gemma3": Case(
        "eagle", {}, {"unroll_steps": 3, "detach": True}, "gemma3", noise=0.12
    ),
    "eagle, two layers, own embeddings, biases": Case(
        "eagle", {**TWO, **OWN, **BIASES}, {**OWN, "feature_noise": 0.0}, "qwen3", noise=0.12
    ),
    "eagle3": Case("eagle3", REDUCED, taps=(1, 2, 3)),
    "eagle3, two taps": Case("eagle3", REDUCED, taps=(1, 2)),
    "eagle3, whole vocabulary, gemma3": Case("eagle3", {}, {}, "gemma3", (0, 3)),
    "eagle3, two layers": Case("eagle3", {**TWO, **REDUCED}, taps=(1, 2)),
    "eagle3, 3.1 fc_norm, qwen3": Case(
        "eagle3", {"fc_norm": True, "norm_output": True}, {}, "qwen3", (1, 2, 3)
    ),
    "eagle3, 3.1 norm_before_fc": Case(
        "eagle3", {"norm_before_fc": True, "norm_before_residual": True}, {}, "gemma3", (1, 2, 3)
    ),
    "eagle3, two layers, window": Case("eagle3", {**TWO, "sliding_window": 3}, {}, "qwen3", (2,)),
    "eagle3, qk_norm": Case("eagle3", {"qk_norm": True, **REDUCED}, taps=(1, 2, 3)),
    "eagle3, own embeddings, four taps, narrower": Case(
        "eagle3", {**OWN, "hidden_size": 24}, OWN, "qwen3", (0, 1, 2, 3)
    ),
    "medusa": Case("medusa", {"num_heads": 3}),
    "medusa, two blocks, no bias": Case(
        "medusa", {"num_heads": 4, **TWO, "fc_bias": False}, {}, "qwen3"
    ),
    "medusa, one projection": Case("medusa", {"num_heads": 3, "shared_lm_head": True}, {}, "qwen2"),
    "medusa, reduced": Case("medusa", {"num_heads": 3, **REDUCED}),
    "mlp": Case("mlp", {}, {"unroll_steps": 3}),
    "mlp, four heads, tied, scaled, gemma3": Case(
        "mlp",
        {"n_predict": 4, "inner_dim": 24, "tie_weights": True, "scale_input": True},
        {"n_predict": 4, "unroll_steps": 4},
        "gemma3",
    ),
    "mlp, reduced": Case("mlp", REDUCED, {"unroll_steps": 3}),
    "peagle": Case(
        "peagle", {"num_depths": 5, **MASK, **REDUCED}, {"own_embeddings": False}, taps=(1, 2, 3)
    ),
    "peagle, window": Case(
        "peagle",
        {"num_depths": 6, **MASK, "sliding_window": 5},
        {"own_embeddings": False},
        taps=(1, 2),
    ),
    "peagle, two layers, own embeddings, fc_norm": Case(
        "peagle", {"num_depths": 4, **MASK, **TWO, **OWN, "fc_norm": True}, {}, "qwen3", (1, 2)
    ),
    "mtp": Case("mtp"),
    "mtp, reduced": Case("mtp", REDUCED),
    "mtp, the state before the norm, qwen3": Case(
        "mtp", {"hidden_state": "residual"}, {}, "qwen3", (3,)
    ),
    "mtp, layer of deepseek_v3": Case("mtp", {}, {}, "deepseek_v3"),
    "mtp, layer of qwen3_next": Case("mtp", {}, {}, "qwen3_next"),
    "mtp, layer of deepseek_v3, reduced": Case("mtp", REDUCED, {}, "deepseek_v3"),
}
# The first case of each family; the others are for properties that a switch may break.
BASE = {case.family: name for name, case in reversed(CASES.items())}


def make(case: Case, model: Any, *, noise: float | None = None) -> World:
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


def world_of(name: str) -> World:
    """The case `name` on a model of its architecture."""
    return make(CASES[name], make_tiny_model(CASES[name].architecture))


def student(target: FrozenTarget, noise: float = 0.0, **options: Any) -> DraftModel:
    """The draft model that a recipe with these options starts with, and some noise."""
    chosen = DraftModelOptions.model_validate(options)
    torch.manual_seed(1)
    config = config_for_target(target, "draft_model", **chosen.shape({}, target))
    drafter = DraftModel(config).attach(target)
    drafter.initialise_from(target, chosen)
    for parameter in drafter.parameters():
        parameter.data += noise * torch.randn_like(parameter)
    return drafter.eval()
