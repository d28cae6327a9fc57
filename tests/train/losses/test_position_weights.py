"""Weights of the drafts of a chain, as written in a loop."""

from __future__ import annotations

import math

import pytest
import torch

from draftsmith.speculators.errors import ConfigError
from draftsmith.train.losses.position_weights import PositionWeights
from tests.support.errors import raises_at

# 5 has no depth 1: it ends there
ANCHORS = [torch.tensor([2, 5, 7]), torch.tensor([7, 2]), torch.tensor([2, 5])]


def chains() -> list[torch.Tensor]:
    source = torch.Generator().manual_seed(0)
    return [torch.rand(len(a), generator=source, dtype=torch.float64) for a in ANCHORS]


def of_anchor(values: list[torch.Tensor], anchor: int) -> list[torch.Tensor]:
    """The terms of one chain, up to the first depth that it lacks."""
    chain = []
    for value, anchors in zip(values, ANCHORS, strict=True):
        where = (anchors == anchor).nonzero().flatten()
        if not len(where):
            break
        chain.append(value[where[0]])
    return chain


def test_d_pace_is_its_formula() -> None:
    probabilities = chains()
    weights = PositionWeights.parse({"d_pace": 0.3}).of_chains(probabilities, ANCHORS, 9)
    for anchor in (2, 5, 7):
        smoothed = [0.7 * float(p) + 0.3 for p in of_anchor(probabilities, anchor)]
        products = [math.prod(smoothed[: m + 1]) for m in range(len(smoothed))]
        expected = [sum(products[k:]) for k in range(len(smoothed))]
        assert [float(w) for w in of_anchor(weights, anchor)] == pytest.approx(expected)
    assert float(weights[2][1]) == 0  # behind a gap


def test_fixed_weights_sum_to_one() -> None:
    for value, ratio in (
        ({"step_decay": 0.8}, 0.8),
        ({"gamma": 4.0}, math.exp(-0.25)),
        ({"uniform": True}, 1.0),
    ):
        weights = PositionWeights.parse(value).of_depths(5)
        assert float(weights.sum()) == pytest.approx(1.0)
        torch.testing.assert_close(weights[1:] / weights[:-1], torch.full((4,), ratio))


@pytest.mark.parametrize(
    "value, key",
    [
        ({"gamma": 4.0, "uniform": True}, "position_weights"),
        *(({"gamma": value}, "position_weights.gamma") for value in (0.0, math.inf)),
        *(({"step_decay": value}, "position_weights.step_decay") for value in (0.0, 1.5)),
        ({"uniform": False}, "position_weights.uniform"),
        *(({"d_pace": value}, "position_weights.d_pace") for value in (-0.5, 1.5)),
        ({"d_pace": True}, "position_weights.d_pace"),
    ],
)
def test_what_is_no_weight_is_named(value, key) -> None:
    with raises_at(ConfigError, key):
        PositionWeights.parse(value)
