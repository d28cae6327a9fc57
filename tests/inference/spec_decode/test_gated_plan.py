"""A round is drafted by whoever is expected to gain the most for its time; that the choice does not
anticipate is held by tests/lossless/test_beside.py."""

from __future__ import annotations

import itertools
from math import prod

import pytest
import torch

from draftsmith.inference.spec_decode.acceptance import Acceptance
from draftsmith.inference.spec_decode.costs import RoundCosts
from draftsmith.inference.spec_decode.gated_plan import PROBED_EVERY, GatedPlan
from draftsmith.inference.spec_decode.proposal import Kept, Proposal

K = 3
COSTS = RoundCosts([10, 11, 12, 13], [0, 2, 4, 6])
CHEAP = RoundCosts([10, 10.5, 11, 11.5], [0, 0.3, 0.6, 0.9])
DEAR = RoundCosts([10, 13, 16, 19], [0, 2, 4, 6])  # K drafts of the head: 1.5 steps more


def knowing(rate: float) -> Acceptance:
    """Of drafts that were accepted at this rate in many rounds, at every depth."""
    acceptance = Acceptance(K)
    acceptance.idle_rounds = 0
    for k in range(K):
        acceptance._accepted[k] = 1e6 * rate
        acceptance._reached[k] = 1e6
    return acceptance


def drafts(*confidences: list[float]) -> Proposal:
    """Of token 7, one row's for each list."""
    return Proposal.deterministic([[7] * len(row) for row in confidences], confidence=confidences)


def expected(*rates: float) -> float:
    return sum(prod(rates[:k]) for k in range(1, len(rates) + 1))


def gains_per_time(sure: float, mean: float) -> dict[str, float]:
    """The rates of one row's choices, K drafts each: tokens for their time."""
    return {
        "off": 1 / COSTS.verify[0],
        "beside": (1 + expected(sure, sure, sure)) / COSTS.verify[K],
        "head": (1 + expected(mean, mean, mean)) / (COSTS.verify[K] + COSTS.draft[K]),
    }


@pytest.mark.parametrize("sure, mean", list(itertools.product([0.05, 0.5, 0.8, 0.95], repeat=2)))
def test_one_row_does_what_has_the_highest_rate(sure, mean):
    plan = GatedPlan(Acceptance(K), knowing(mean), [K], COSTS)
    taken, asked = plan.divide(drafts([sure] * K))
    rates = gains_per_time(sure, mean)
    best = max(rates, key=rates.__getitem__)
    assert (asked == [K], taken == [K]) == (best == "head", best == "beside")


def test_nothing_is_drafted_where_neither_pays():
    """A first draft that would pay beside a head that is always asked, though not beside none."""
    plan = GatedPlan(Acceptance(K), knowing(0.02), [K], COSTS)
    assert plan.divide(drafts([0.07])) == ([0], [0])


def test_drafts_beside_end_where_they_stop_paying():
    plan = GatedPlan(Acceptance(K), knowing(0.1), [K], COSTS)
    assert plan.divide(drafts([0.9, 0.9, 0.05])) == ([2], [0])


def test_rows_of_a_round_that_asks_the_head_take_what_gains_more():
    plan = GatedPlan(Acceptance(K), knowing(0.8), [K, K, 1, 0], CHEAP)
    taken, asked = plan.divide(drafts([], [0.95] * K, [0.3], []))
    assert (taken, asked) == ([0, K, 0, 0], [K, 0, 1, 0])


def test_a_head_is_not_asked_for_one_row_of_many():
    """All rows wait while it drafts."""
    sure = [[0.95] * K] * 7
    one = GatedPlan(Acceptance(K), knowing(0.8), [K], COSTS)
    many = GatedPlan(Acceptance(K), knowing(0.8), [K] * 8, COSTS)
    assert one.divide(drafts([])) == ([0], [K])
    assert many.divide(drafts([], *sure)) == ([0] + [K] * 7, [0] * 8)


def test_a_head_that_does_not_pay_is_probed_and_asked_again_once_it_does():
    head = Acceptance(K)
    beside = Acceptance(K)
    asked_in: list[bool] = []

    def rounds(number: int, right: int) -> None:
        for _ in range(number):
            plan = GatedPlan(beside, head, [K], DEAR)
            _, asked = plan.divide(drafts([]))
            asked_in.append(asked == [K])
            accepted = right if asked_in[-1] else 0
            plan.learn([Kept(list(range(accepted)), [5] * (accepted + 1))])

    rounds(10 * PROBED_EVERY, right=1)
    probes = [turn for turn, asked in enumerate(asked_in) if asked]
    assert probes[-1] - probes[-7] == 6 * PROBED_EVERY
    rounds(2 * PROBED_EVERY, right=2)
    assert all(asked_in[-PROBED_EVERY:])


def test_a_head_is_asked_at_first():
    plan = GatedPlan(Acceptance(K), Acceptance(K), [K], COSTS)
    assert plan.divide(drafts([0.95] * K)) == ([0], [K])


@pytest.mark.parametrize("ask", [True, False])
def test_drafts_beside_are_judged_whoever_drafted(ask):
    """Sure of two tokens that are wrong: of the first in every round, though the head drafts."""
    beside, head = Acceptance(K), knowing(0.8 if ask else 0.1)
    for _ in range(50):
        plan = GatedPlan(beside, head, [K], COSTS)
        _, asked = plan.divide(drafts([0.4, 0.4]))
        assert (asked == [K]) == ask
        plan.learn([Kept([], [5])])
        head.idle_rounds = 0
    (after,) = beside.by_confidence([0.9])
    assert after < 0.3


def test_a_draft_beside_is_right_as_far_as_its_tokens_were_committed():
    beside = Acceptance(K)
    plan = GatedPlan(beside, knowing(0.8), [K] * 3, COSTS)
    tokens = torch.tensor([[7, 8, 9], [7, 8, 9], [7, 0, 0]])
    plan.divide(Proposal(tokens, [3, 3, 1], confidence=torch.full((3, 3), 0.5)))
    # two known and right, of the third nothing; one right, one wrong; one, and no second
    plan.learn([Kept([0], [7, 8]), Kept([0], [7, 5]), Kept([0], [7, 0])])
    assert beside._reached == [3, 2, 0]
    assert beside._accepted == [3, 1, 0]


def test_a_round_without_room_drafts_nothing():
    plan = GatedPlan(Acceptance(K), Acceptance(K), [0, 0], COSTS)
    assert plan.divide(Proposal.empty(2)) == ([0, 0], [0, 0])
    plan.learn([Kept([], [1]), Kept([], [1])])
