"""Where a round's time goes: the parts of a round in plain decoding steps, the acceptance length
that pays for them, and what to do where it does not. The one definition of every table and page.

A round with drafts commits τ tokens in the time of c plain steps, each of which commits one: it is
as fast as plain decoding at τ = c. So c, the sum of the parts, is the acceptance length at which a
drafter breaks even, and τ ÷ c the speedup of the rounds that draft."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from statistics import fmean, median
from typing import Any

from draftsmith.inference.metrics import (
    DRAFT_FORWARD,
    DRAFT_HEAD,
    PARTS,
    REST,
    SAMPLING,
    VERIFICATION,
)
from draftsmith.inference.report.schema import Cell, RoundCost

LEAST_ROUNDS = 5  # of a mean
PAUSE = 3.0  # times the median, from which a round is left out: the machine did something else
REMEDIES = {
    VERIFICATION: "verify fewer tokens at once: a lower K, or fewer requests at the same time",
    DRAFT_FORWARD: "a lower K, a smaller drafter, or a family that drafts all in one forward",
    DRAFT_HEAD: "a smaller draft vocabulary (draft_vocab_size), or a lower K",
    SAMPLING: "a smaller draft vocabulary (draft_vocab_size), or a lower K",
    REST: "compiled rounds (no enforce_eager), or a lower K",
}


@dataclass(frozen=True)
class RoundTime:
    """One round of an engine.

    rows       requests that it served
    drafts     tokens drafted, of all rows together
    seconds    by part (`metrics.PARTS`), as far as it had them; their sum is the round"""

    rows: int
    drafts: int
    seconds: dict[str, float]

    @property
    def total(self) -> float:
        """Seconds of the whole round."""
        return sum(self.seconds.values())


@dataclass
class RoundTimes:
    """Rounds that were timed next to each other, on the same prompts.

    plain      without drafting
    drafting   as the engine drafts
    single     of one draft per row; empty where its cost would say nothing of longer chains"""

    plain: list[RoundTime] = field(default_factory=list)
    drafting: list[RoundTime] = field(default_factory=list)
    single: list[RoundTime] = field(default_factory=list)


def round_cost(parts: Sequence[RoundTimes], num_speculative_tokens: int) -> RoundCost | None:
    """The report's record of the rounds timed on some workloads, K drafts at most; None with too
    few of them."""
    plain = _usual(time for times in parts for time in times.plain)
    drafting = _usual(_drafted(times.drafting for times in parts))
    single = _usual(_drafted(times.single for times in parts))
    if min(len(plain), len(drafting)) < LEAST_ROUNDS:
        return None
    step = _mean(plain)
    shares: dict[str, Any] = {
        part: fmean(time.seconds.get(part, 0.0) for time in drafting) / step for part in PARTS
    }
    if not any(DRAFT_HEAD in time.seconds for time in drafting):
        shares[DRAFT_HEAD] = None
    drafts_per_row = fmean(time.drafts / time.rows for time in drafting)
    whole = _mean(drafting) / step
    by_length: list[float] = []
    if len(single) >= LEAST_ROUNDS and drafts_per_row > 1:
        first = _mean(single) / step
        rise = (whole - first) / (drafts_per_row - 1)
        by_length = [first + rise * k for k in range(num_speculative_tokens)]
    return RoundCost(
        plain_step_seconds=step,
        timed_rounds=len(drafting),
        drafts_per_row=drafts_per_row,
        break_even_acceptance_length=whole,
        break_even_by_length=by_length,
        **shares,
    )


def _drafted(passes: Iterable[Sequence[RoundTime]]) -> list[RoundTime]:
    """The rounds of these passes in which something was drafted."""
    return [time for time in chain.from_iterable(passes) if time.drafts]


def _usual(times: Iterable[RoundTime]) -> list[RoundTime]:
    """The rounds with all rows in use, without those in which the machine paused."""
    rounds = list(times)
    rows = max((time.rows for time in rounds), default=0)
    full = [time for time in rounds if time.rows == rows]
    usual = median([time.total for time in full]) if full else 0.0
    return [time for time in full if time.total <= PAUSE * usual]


def _mean(times: Sequence[RoundTime]) -> float:
    return fmean(time.total for time in times)


# ------------------------------------------------------------------ what to do


def why_slower(cell: Cell) -> list[str]:
    """Why drafting was slower than plain decoding, and what to do, a sentence each; nothing where
    it was not slower, or where rounds were not timed."""
    cost = cell.round_cost
    speedup = cell.speedup_vs_autoregressive
    if cost is None or speedup is None or speedup.value >= 1:
        return []
    whole = cost.break_even_acceptance_length
    length = cell.acceptance_length
    begin = f"a round costs {whole:.2f} plain steps and commits τ = {length:.2f} tokens"
    if length >= whole:
        return [
            f"slower than plain decoding, though {begin}: prefills and rounds without a draft take"
            " the time; longer responses gain more"
        ]
    beyond = {part: getattr(cost, part) or 0.0 for part in PARTS}
    beyond[VERIFICATION] -= 1  # the target's own step
    largest = max(beyond, key=lambda part: beyond[part])
    name = largest.replace("_", " ")
    lines = [
        f"slower than plain decoding: {begin}; beyond the plain step most goes to {name}"
        f" ({beyond[largest]:.2f}): {REMEDIES[largest]}"
    ]
    speedups = speedups_by_length(cell)
    if speedups and (best := max(speedups)) > speedups[-1]:
        k = 1 + speedups.index(best)
        lines.append(
            f"with K = {k} a round would cost about {cost.break_even_by_length[k - 1]:.2f} plain"
            f" steps, and drafting would be {best:.2f} times as fast as plain decoding"
        )
    if (rest := whole - beyond[largest]) >= length:
        lines.append(
            f"acceptance is low, too: with no {name} at all τ would have to be {rest:.2f}; train"
            " longer, or on prompts like these"
        )
    return lines


def speedups_by_length(cell: Cell) -> list[float]:
    """The speedup of rounds with 1…K drafts: τ of the first k ÷ the cost of such a round; empty
    where shorter chains were not timed."""
    cost = cell.round_cost
    rates = [rate or 0.0 for rate in cell.joint_acceptance_per_position]
    if cost is None:
        return []
    lengths = accumulate(rates, initial=1.0)
    next(lengths)  # of no draft
    return [tau / paid for tau, paid in zip(lengths, cost.break_even_by_length)]
