"""Starting weights: a fitted head predicts before it is trained, at every depth, and copies."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from draftsmith.speculators.errors import ConfigError
from draftsmith.speculators.families.eagle3 import Eagle3
from draftsmith.speculators.families.least_squares import RIDGE, Regression, reduced_rank, ridge
from draftsmith.speculators.registry import config_for_target, family_class
from draftsmith.speculators.target.frozen_target import FrozenTarget, TargetFeatures
from tests.support.errors import raises_at
from tests.support.quickstart_data import rows

TARGET = Path(__file__).resolve().parents[3] / "recipes" / "quickstart" / "target"
pytestmark = pytest.mark.slow
SHAPE = {"norm_before_residual": True, "num_key_value_heads": 4}


@pytest.fixture(scope="module")
def target() -> FrozenTarget:
    return FrozenTarget.from_pretrained(str(TARGET), tap_layers=(2, 8, 13), dtype=torch.float32)


@pytest.fixture(scope="module")
def features(target) -> list[TargetFeatures]:
    return features_of(target, rows("train", 24))


@pytest.fixture(scope="module")
def held_out(target) -> list[TargetFeatures]:
    return features_of(target, rows("train", 4, 40))


def features_of(target, conversations) -> list[TargetFeatures]:
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    features = []
    for conversation in conversations:
        out = tokenizer.apply_chat_template(
            conversation["messages"],
            return_assistant_tokens_mask=True,
            return_dict=True,
            return_tensors="pt",
        )
        ids, places = out["input_ids"], torch.arange(out["input_ids"].shape[1])[None]
        mask = out["assistant_masks"].view_as(ids).bool()
        features.append(target.features(ids, places, torch.zeros_like(ids), mask))
    return features


def started(target, family, fitted_to, options=None, **shape) -> Any:
    torch.manual_seed(0)
    config = config_for_target(target, family, tap_layers=target.tap_layers, **shape)
    drafter = family_class(family)(config).attach(target)
    return drafter.initialise_from(target, options, fitted_to).eval()


def head(target, *, fitted_to=None, **shape) -> Eagle3:
    return started(target, "eagle3", fitted_to, **(SHAPE | shape))


def block(target, family, *, fitted_to=None, init="least_squares", **shape) -> Any:
    shape = {"num_layers": 2, "num_key_value_heads": 4, "block_size": 5, "mask_token_id": 4} | shape
    return started(target, family, fitted_to, family_class(family).options(init=init), **shape)


def accepted_by_depth(target, drafter, held_out) -> list[float]:
    """Greedy acceptance of each of four depths, given the text before, over all anchors."""
    hits, asked = torch.zeros(4), torch.zeros(4)
    for f in held_out:
        for step in drafter.unroll(f, 4):
            predicted = drafter.head(step.hidden).argmax(-1)
            expected = target.logits(f.last_hidden.flatten(0, 1)[step.target_index]).argmax(-1)
            hits[step.depth] += (predicted == expected).sum()
            asked[step.depth] += len(expected)
    return (hits / asked).tolist()


def test_a_fitted_head_predicts_at_every_depth_before_it_is_trained(target, features, held_out):
    with torch.no_grad():
        plain = accepted_by_depth(target, head(target), held_out)
        fitted = accepted_by_depth(target, head(target, fitted_to=features), held_out)
    assert all(f > 2 * p for f, p in zip(fitted, plain)), (plain, fitted)
    assert fitted[0] > 0.3 and fitted[3] > 0.5 * fitted[0], fitted


def test_the_last_group_of_heads_copies(target, features):
    again = features_of(target, rows("train", 8, 100, workloads=["rewrite"]))
    with torch.no_grad():
        drafter = head(target, fitted_to=features)
        with_copying = accepted_by_depth(target, drafter, again)
        D = drafter.config.head_dim
        drafter.layers[0].self_attn.o_proj.weight[:, -D:] = 0.0
        without = accepted_by_depth(target, drafter, again)
    assert all(w > o + 0.02 for w, o in zip(with_copying, without)), (with_copying, without)


@pytest.mark.parametrize("shape", [{}, {"num_layers": 2}, {"norm_output": True}], ids=str)
def test_the_mlp_is_fitted_to_what_attention_leaves(target, features, shape):
    held_out = features_of(target, rows("train", 24, 40))
    with torch.no_grad():
        drafter = head(target, fitted_to=features, **shape)
        with_mlp = accepted_by_depth(target, drafter, held_out)
        drafter.layers[-1].mlp.down_proj.weight.zero_()
        without = accepted_by_depth(target, drafter, held_out)
    assert sum(with_mlp) > sum(without) + 0.05, (with_mlp, without)


@pytest.mark.parametrize(
    "shape",
    [
        {"num_key_value_heads": 1, "num_attention_heads": 2},
        {"num_layers": 2, "qk_norm": True},
        {"fc_norm": True, "norm_output": True},
        {"own_embeddings": True, "draft_vocab_size": 1024},
    ],
    ids=lambda shape: " ".join(f"{k}={v}" for k, v in shape.items()),
)
def test_every_shape_of_head_can_be_fitted(target, features, held_out, shape):
    with torch.no_grad():
        plain = accepted_by_depth(target, head(target, **shape), held_out[:3])
        fitted = accepted_by_depth(
            target, head(target, fitted_to=features[:16], **shape), held_out[:3]
        )
    if "draft_vocab_size" not in shape:  # whose ids nobody has chosen here
        assert fitted[0] > 1.5 * plain[0], (plain, fitted)
    assert all(torch.isfinite(torch.tensor(fitted)))


def test_what_cannot_be_fitted_is_refused(target, features):
    with raises_at(ConfigError, "drafter.init"):
        head(target, fitted_to=features[:1], norm_before_residual=False)
    silent = [dataclasses.replace(f, loss_mask=torch.zeros_like(f.loss_mask)) for f in features[:2]]
    with raises_at(ConfigError, "drafter.init"):
        head(target, fitted_to=silent)
    with raises_at(ConfigError, "drafter.init"):
        block(target, "dflash", fitted_to=silent)
    wide = {"hidden_size": 128, "num_attention_heads": 4, "head_dim": 32}
    with pytest.raises(ConfigError, match="hidden_size"):
        block(target, "dflash", fitted_to=features[:2], **wide)
    other = FrozenTarget(target.model, (1, 2, 3))
    drafter = Eagle3(config_for_target(other, "eagle3", tap_layers=(2, 8, 13))).attach(other)
    with raises_at(ConfigError, "initialise_from"):
        drafter.initialise_from(other)
    other.close()


def test_taps_of_any_size_start_at_unit_size(target, features):
    """A residual stream of tens would drown the layer that is added to it."""
    drafter = head(target, norm_before_residual=False)
    size = drafter.first_state(features[0].taps, None).square().mean(-1).sqrt().median()
    assert features[0].taps.square().mean().sqrt() > 5 and 0.5 < size < 2


@pytest.mark.parametrize(
    ("family", "shape"),
    [
        ("dflash", {"is_causal": True, "num_key_value_heads": 2}),
        ("dflash", {"sliding_window": 8, "num_layers": 1}),
        ("dflash2", {}),
        ("dspark", {"num_attention_heads": 8, "num_key_value_heads": 8, "num_layers": 1}),
    ],
    ids=str,
)
def test_a_fitted_block_predicts_in_every_slot_before_it_is_trained(
    target, features, held_out, family, shape
):
    with torch.no_grad():
        plain = accepted_by_depth(target, block(target, family, init="taps", **shape), held_out)
        fitted = accepted_by_depth(
            target, block(target, family, fitted_to=features, **shape), held_out
        )
    assert all(f > 2 * p and f > 0.1 for f, p in zip(fitted, plain, strict=True)), (plain, fitted)


def test_the_mlp_of_a_block_is_fitted_to_what_attention_leaves(target, features, held_out):
    with torch.no_grad():
        drafter = block(target, "dflash", fitted_to=features, num_layers=1)
        with_mlp = accepted_by_depth(target, drafter, held_out)
        drafter.layers[0].mlp.down_proj.weight.zero_()
        without = accepted_by_depth(target, drafter, held_out)
    assert sum(with_mlp) > sum(without) + 0.05, (with_mlp, without)


def test_the_bias_of_the_token_before_is_fitted_too(target, features, held_out):
    with torch.no_grad():
        drafter = block(target, "dspark", fitted_to=features, num_layers=1)
        fitted = accepted_by_depth(target, drafter, held_out)
        drafter.markov_head.markov_w2.weight.zero_()
        without = accepted_by_depth(target, drafter, held_out)
    assert all(f > w for f, w in zip(fitted[1:], without[1:], strict=True)), (without, fitted)


def test_a_regression_in_parts_is_that_of_all_terms():
    torch.manual_seed(0)
    x = torch.randn(300, 12) * torch.linspace(0.1, 3, 12)
    y = torch.randn(300, 7)
    parts = Regression()
    for part in torch.arange(300).split(70):
        parts.add(x[part], y[part])
    size = x.square().mean(0).sqrt()
    scaled = x / size
    gram = scaled.T @ scaled + RIDGE * 300 * torch.eye(12)
    torch.testing.assert_close(
        parts.solve(), torch.linalg.solve(gram, scaled.T @ y) / size[:, None]
    )


def test_a_map_of_low_rank_is_the_best_on_its_inputs():
    torch.manual_seed(0)
    x = torch.randn(512, 12) @ torch.randn(12, 12) * torch.linspace(0.1, 3, 12)
    matrix = ridge(x, torch.randn(512, 7) + x[:, :7])
    first, second = reduced_rank(x, matrix, 3)
    best = torch.linalg.svdvals(x @ matrix)[3:].square().sum()  # Eckart and Young, on the outputs
    assert (x @ matrix - x @ first @ second).square().sum() <= 1.01 * best


def test_short_responses_fit_a_head_whose_unroll_drops_slots(target):
    """P-EAGLE goes on with the slots that deeper depths use, where these are few enough."""
    features = [short_responses(f) for f in features_of(target, rows("train", 2))]
    drafter = started(target, "peagle", features, **SHAPE, num_depths=4, mask_token_id=4)
    assert drafter.layers[-1].mlp.down_proj.weight.abs().max() > 0


def short_responses(features: TargetFeatures) -> TargetFeatures:
    """With 8 supervised tokens of every 16 of the response."""
    place = features.loss_mask.cumsum(1)
    return dataclasses.replace(features, loss_mask=features.loss_mask & (place % 16 < 8))
