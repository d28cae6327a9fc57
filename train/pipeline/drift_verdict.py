"""Whether a head drafts worse for the traffic of today than it did before, and by how much."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from draftsmith.inference.metrics import acceptance_length, influences, sum_of_squares
from draftsmith.train.pipeline.refresh_gate import ERRORS, LEAST_CONVERSATIONS

# Of (τ - 1), from which a refresh is worth its minutes; not of τ, as for the gate.
LEAST_LOSS = 0.1


@dataclass(frozen=True)
class Acceptance:
    """An acceptance length, and what it rests on.

    units    independent ones: conversations, or intervals of a server's counters
    tokens   that the rounds wrote
    length   τ
    error    its standard error; 0 of one unit
    """

    units: int
    tokens: float
    length: float
    error: float

    @classmethod
    def of(cls, totals: Sequence[tuple[float, float]]) -> Acceptance:
        """`totals`: rounds and accepted drafts, by unit."""
        rounds = sum(r for r, _ in totals)
        accepted = sum(a for _, a in totals)
        return cls(
            units=len(totals),
            tokens=rounds + accepted,
            length=acceptance_length(accepted, rounds),
            error=math.sqrt(sum_of_squares(influences(totals))),
        )


@dataclass(frozen=True)
class Day:
    """A day of traffic.

    start        in seconds since 1970
    requests     in the log, of the target
    source       of `acceptance`
    most_drafts  of a round
    acceptance   None: there is nothing to know it by
    """

    start: float
    requests: int
    source: str
    most_drafts: int
    acceptance: Acceptance | None

    @property
    def enough(self) -> bool:
        """To be compared with other days."""
        return self.acceptance is not None and self.acceptance.units >= LEAST_CONVERSATIONS

    def like(self, other: Day) -> bool:
        """Measured in the same way: counters and replay differ by more than the traffic does."""
        return (self.source, self.most_drafts) == (other.source, other.most_drafts)


@dataclass(frozen=True)
class Reference:
    """What the newest day is compared with. `error`: of `length`; 0: not known."""

    name: str
    length: float
    error: float


@dataclass(frozen=True)
class Comparison:
    """The newest day beside one reference."""

    reference: Reference
    newest: Acceptance

    @property
    def lost(self) -> float:
        """Of τ."""
        return self.reference.length - self.newest.length

    @property
    def share(self) -> float:
        """Of the reference's τ - 1."""
        drafted = self.reference.length - 1
        return self.lost / drafted if drafted else 0.0

    @property
    def is_drift(self) -> bool:
        """A loss that is worth a refresh, and no chance. So is one that is no number."""
        error = math.hypot(self.reference.error, self.newest.error)
        return not (self.share < LEAST_LOSS or self.lost <= ERRORS * error)

    def __str__(self) -> str:
        sign = "below" if self.lost > 0 else "above"
        was = f"{self.reference.length:.3f}"
        if self.reference.error:
            was += f" ± {self.reference.error:.3f}"
        return (
            f"τ - 1 is {100 * abs(self.share):.0f} % {sign} {self.reference.name}"
            f" ({self.newest.length:.3f} ± {self.newest.error:.3f} against {was})"
        )


def newest_day(days: Sequence[Day]) -> Day | None:
    """The newest of the `days`, which are in the order of time, that is enough to be compared."""
    return next((day for day in reversed(days) if day.enough), None)


def first_day(days: Sequence[Day], newest: Day) -> Reference | None:
    """The oldest of the `days` that the newest one can be compared with."""
    for day in days:
        if day is not newest and day.enough and day.like(newest) and day.acceptance:
            return Reference("the first day's", day.acceptance.length, day.acceptance.error)
    return None


def advice(comparisons: Sequence[Comparison]) -> str:
    """One sentence."""
    drifts = [comparison for comparison in comparisons if comparison.is_drift]
    if drifts:
        return f"a refresh is worth it: {max(drifts, key=lambda one: one.share)}"
    return (
        f"nothing to do: {max(comparisons, key=lambda one: one.share)}; a refresh is worth it from"
        f" {100 * LEAST_LOSS:.0f} % and {ERRORS:g} standard errors"
    )
