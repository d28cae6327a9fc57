"""The cost model's limit and efficiency: known values, limits and refusals."""

from __future__ import annotations

import math

import pytest

from inference.report.cost_model import efficiency, speedup_limit
from speculators.errors import DataError


def test_free_drafts_and_free_verification_give_the_acceptance_length() -> None:
    assert speedup_limit(3.4, step_cost=2.0, verify_cost=2.0, draft_cost=0.0) == pytest.approx(3.4)


def test_a_worked_example() -> None:
    # Verifying 5 tokens costs 1.1 steps, drafting 4 costs 0.2 steps, 3.25 tokens per round: 3.25 /
    # 1.3.
    assert speedup_limit(3.25, step_cost=1.0, verify_cost=1.1, draft_cost=0.2) == pytest.approx(2.5)


def test_the_unit_of_time_does_not_matter() -> None:
    seconds = speedup_limit(2.7, step_cost=0.004, verify_cost=0.005, draft_cost=0.001)
    assert speedup_limit(2.7, step_cost=4.0, verify_cost=5.0, draft_cost=1.0) == pytest.approx(
        seconds
    )


def test_efficiency_may_pass_one() -> None:
    assert efficiency(2.25, 2.5) == pytest.approx(0.9)
    assert efficiency(2.6, 2.5) > 1


@pytest.mark.parametrize(
    ("tau", "step", "verify", "draft", "message"),
    [
        (0.9, 1.0, 1.0, 0.0, "acceptance_length is 0.9"),
        (math.nan, 1.0, 1.0, 0.0, "acceptance_length is nan"),
        (2.0, 0.0, 1.0, 0.0, r"step_cost, V\(1\) is 0.0"),
        (2.0, 1.0, -1.0, 0.0, "verify_cost"),
        (2.0, 1.0, 1.0, -0.1, "zero or a positive"),
        (2.0, 1.0, math.inf, 0.0, "verify_cost"),
    ],
)
def test_what_cannot_be_a_time_is_refused(
    tau: float, step: float, verify: float, draft: float, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        speedup_limit(tau, step_cost=step, verify_cost=verify, draft_cost=draft)


def test_efficiency_refuses_zero() -> None:
    with pytest.raises(DataError, match="measured_speedup"):
        efficiency(0.0, 2.0)
