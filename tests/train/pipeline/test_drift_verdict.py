"""When a refresh is worth it: a loss that is large and no chance, on days measured alike."""

from __future__ import annotations

import math

import numpy as np
import pytest

from draftsmith.train.pipeline.drift_verdict import (
    Acceptance,
    Comparison,
    Day,
    Reference,
    advice,
    first_day,
    newest_day,
)


@pytest.mark.parametrize(
    ("before", "now", "error", "drifts"),
    [
        (2.0, 1.89, 0.01, True),
        (2.0, 1.91, 0.01, False),  # less than a tenth of τ - 1
        (1.5, 1.44, 0.01, True),  # of τ - 1, not of τ
        (2.0, 1.89, 0.06, False),  # within two standard errors
        (2.0, 2.5, 0.01, False),
        (2.0, math.nan, math.nan, True),
    ],
)
def test_drift_at_its_bounds(before, now, error, drifts):
    newest = Acceptance(100, 1e4, now, error)
    comparison = Comparison(Reference("the first day's", before, 0.0), newest)
    assert comparison.is_drift is drifts
    assert advice([comparison]).startswith("a refresh is worth it" if drifts else "nothing to do")


def test_error_of_the_reference_counts_too():
    newest = Acceptance(100, 1e4, 1.85, 0.05)
    assert Comparison(Reference("", 2.0, 0.0), newest).is_drift
    assert not Comparison(Reference("", 2.0, 0.06), newest).is_drift


def test_the_worst_comparison_is_told():
    newest = Acceptance(100, 1e4, 1.5, 0.01)
    other = Comparison(Reference("the other's", 1.7, 0.0), newest)
    worst = Comparison(Reference("the worst's", 2.0, 0.0), newest)
    assert "50 % below the worst's" in advice([other, worst])


def day(start: float, units: int = 30, source: str = "replay", k: int = 4) -> Day:
    return Day(start, units, source, k, Acceptance(units, 1e3, 1.0 + start, 0.1))


@pytest.mark.parametrize(
    ("days", "newest", "first"),
    [
        ([day(1), day(2), day(3)], 3, 1),
        ([day(1), day(2), day(3, units=29)], 2, 1),
        ([day(1, units=29), day(2), day(3)], 3, 2),
        ([day(1, source="answers"), day(2), day(3)], 3, 2),
        ([day(1, k=3), day(2), day(3)], 3, 2),
        ([day(3)], 3, None),
        ([Day(1, 9, "replay", 4, None), day(3)], 3, None),
        ([day(3, units=29)], None, None),
    ],
)
def test_days_that_are_compared_are_measured_alike_and_have_enough(days, newest, first):
    latest = newest_day(days)
    assert (latest and latest.start) == newest
    reference = latest and first_day(days, latest)
    assert (reference and reference.length) == (first and 1.0 + first)


def test_standard_error_is_that_of_the_ratio_over_conversations():
    """By the bootstrap."""
    rng = np.random.default_rng(0)
    rounds = rng.integers(5, 60, 400)
    accepted = rng.binomial(4 * rounds, rng.beta(2, 5, 400))
    totals = np.stack([rounds, accepted], 1)
    acceptance = Acceptance.of([tuple(pair) for pair in totals.tolist()])
    draws = totals[rng.integers(0, 400, (4000, 400))].sum(1)
    spread = np.std(draws[:, 1] / draws[:, 0])
    assert acceptance.length == pytest.approx(1 + accepted.sum() / rounds.sum())
    assert acceptance.error == pytest.approx(spread, rel=0.05)
    assert acceptance.tokens == totals.sum() and acceptance.units == 400
