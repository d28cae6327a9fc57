"""Where a round's time goes: shares of a plain step, the acceptance length that pays, and the
remedy."""

from __future__ import annotations

import pytest

from draftsmith.inference.metrics import DRAFT_HEAD, PARTS
from draftsmith.inference.report.build import build_report
from draftsmith.inference.report.html import render_html
from draftsmith.inference.report.measurement import Measurement, make_cell
from draftsmith.inference.report.round_cost import (
    REMEDIES,
    RoundTime,
    RoundTimes,
    round_cost,
    speedups_by_length,
    why_slower,
)
from draftsmith.inference.report.table import notes
from tests.support.reports import K, passes, provenance, request

STEP = 0.02  # seconds of a plain one
SHARES = {
    "verification": 1.2,
    "draft_forward": 0.2,
    "draft_head": 0.4,
    "sampling": 0.1,
    "rest": 0.1,
}


def timed(shares: dict[str, float], drafts: int, rounds: int = 6, rows: int = 1) -> list[RoundTime]:
    """Rounds of these costs in plain steps."""
    seconds = {part: share * STEP for part, share in shares.items()}
    return [RoundTime(rows, drafts * rows, seconds) for _ in range(rounds)]


def times(shares: dict[str, float] = SHARES, single: dict[str, float] | None = None) -> RoundTimes:
    plain = timed({"verification": 0.9, "sampling": 0.1}, 0)
    return RoundTimes(plain, timed(shares, K), timed(single, 1) if single else [])


def measured(accepted: list[int], speedup: float, rounds: RoundTimes) -> Measurement:
    kinds = {
        "speculative": passes("w", 100, [1.0] * 3),
        "autoregressive": passes("w", 100, [speedup] * 3),
    }
    return Measurement("w", 0.0, "eagle3", K, [request(accepted)], passes=kinds, rounds=rounds)


def test_parts_are_shares_of_a_plain_step_and_their_sum_is_the_length_that_pays() -> None:
    cost = round_cost([times()], K)
    assert {part: getattr(cost, part) for part in PARTS} == pytest.approx(SHARES)
    assert cost.break_even_acceptance_length == pytest.approx(2.0)
    assert cost.plain_step_seconds == pytest.approx(STEP)
    assert (cost.timed_rounds, cost.drafts_per_row) == (6, K)
    headless = round_cost([times({p: s for p, s in SHARES.items() if p != DRAFT_HEAD})], K)
    assert headless.draft_head is None
    assert headless.break_even_acceptance_length == pytest.approx(1.6)


def test_rounds_that_are_not_like_the_others_do_not_count() -> None:
    odd = times()
    odd.drafting += timed({"verification": 50.0}, K, 1)  # the machine paused
    odd.drafting += timed({"verification": 0.9}, 0, 3)  # nothing drafted
    for rounds in (odd.plain, odd.drafting):
        rounds[:] = [RoundTime(2, 2 * r.drafts, r.seconds) for r in rounds]
        rounds += timed({"verification": 0.5}, K, 3)  # one of two rows has ended
    cost = round_cost([odd], K)
    assert cost.break_even_acceptance_length == pytest.approx(2.0)
    assert (cost.timed_rounds, cost.drafts_per_row) == (6, K)


def test_workloads_are_pooled_round_by_round_and_few_rounds_say_nothing() -> None:
    few = times()
    few.drafting = few.drafting[:3]
    assert round_cost([few], K) is None and round_cost([], K) is None
    parts = [measured([1] * 4, 1.0, few), measured([1] * 4, 1.0, times())]
    cell = make_cell(parts, "all")
    assert cell.round_cost.timed_rounds == 9
    assert cell.round_cost.break_even_acceptance_length == pytest.approx(2.0)


def test_cost_of_shorter_chains_lies_on_a_line_from_one_draft_to_all() -> None:
    cell = measured([4, 1, 0, 1], 0.8, times(single={"verification": 1.4})).cell()
    costs = [1.4, 1.6, 1.8, 2.0]
    assert cell.round_cost.break_even_by_length == pytest.approx(costs)
    lengths = [1.75, 2.0, 2.25, 2.5]  # τ of the first 1…K drafts
    expected = [tau / cost for tau, cost in zip(lengths, costs, strict=True)]
    assert speedups_by_length(cell) == pytest.approx(expected)
    assert speedups_by_length(measured([4], 0.8, times()).cell()) == []


@pytest.mark.parametrize("part", PARTS)
def test_what_is_slower_names_its_largest_part_and_the_remedy(part: str) -> None:
    shares = {**SHARES, part: SHARES[part] + 2.0}
    (line,) = why_slower(measured([1, 1, 0, 2], 0.6, times(shares)).cell())
    assert "costs 4.00 plain steps and commits τ = 2.00 tokens" in line
    assert part.replace("_", " ") in line and REMEDIES[part] in line
    *_, low = why_slower(measured([1, 0, 0, 0], 0.6, times(shares)).cell())  # τ = 1.25
    assert "acceptance is low, too" in low


def test_what_is_slower_is_told_a_length_that_pays() -> None:
    (first, second) = why_slower(
        measured([1, 1, 1, 0], 0.9, times(single={"verification": 1.25})).cell()
    )
    assert "costs 2.00" in first and "with K = 1 a round would cost about 1.25" in second
    assert "1.40 times as fast" in second


def test_advice_is_for_what_is_slower_and_was_timed() -> None:
    assert why_slower(measured([1] * 4, 1.1, times()).cell()) == []
    assert why_slower(measured([1] * 4, 0.9, RoundTimes()).cell()) == []
    (line,) = why_slower(measured([4] * 4, 0.9, times()).cell())  # the rounds alone would pay
    assert "prefills and rounds without a draft" in line


def test_table_page_and_notes_show_it() -> None:
    report = build_report([measured([1, 1, 0, 0], 0.7, times())], provenance())
    page = render_html(report)
    assert "Where a round's time goes" in page
    for value in (*SHARES.values(), 2.0):
        assert f'<td class="n">{value:.2f}</td>' in page
    (line,) = (line for line in notes(report) if "slower than plain decoding" in line)
    assert line.startswith("T=0: ") and line.partition(":")[0] in page
