"""Costs of a round: V(n), a forward of the target over n tokens per row, and D(k), drafting k
tokens per row.

They are given, and then constant, which makes draft lengths a function of the text alone; or
measured. The first round of a batch size times forwards of several widths over the rows at the
context they have, rolls them back, and takes the best of interleaved repeats, as a disturbance only
ever makes a forward longer. From then on every round corrects the figures, since contexts grow and
machines slow down."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from itertools import accumulate
from time import perf_counter

import numpy as np

from inference.requests.request import Request
from inference.spec_decode.proposers.base import Proposer
from speculators.errors import ConfigError

Forward = Callable[
    [int, int], None
]  # (rows, tokens per row): one forward over rows as they are, and waits for it

MEASURING_SECONDS = 0.5  # per batch size, unless MIN_REPEATS of each part take longer
MIN_REPEATS, MAX_REPEATS = 3, 9
SHARED_RATIO = 1.5  # batch sizes within this ratio share one measurement

COMMON_RATE = 0.03  # learning rate of all figures of a curve, per round, in log seconds
WIDTH_RATE, WIDTH_ROUNDS = (
    1.0,
    12.0,
)  # that of the round's own width beside it: rate / (rounds + its rounds so far)
MIN_WIDTH_RATE = 0.01
NEIGHBOUR_RATE = 0.6  # of the own width's rate, per width of distance
MAX_LOG_ERROR = 0.4  # larger departures are clipped: a pause of the machine is no cost


class RoundCosts:
    """Constant costs, the same at every batch size: `verify` V(1) … V(K+1), `draft` D(1) … D(K), in
    any one unit."""

    def __init__(self, verify: Sequence[float], draft: Sequence[float]) -> None:
        self._verify, self._draft = [float(cost) for cost in verify], [0.0, *map(float, draft)]

    @classmethod
    def given(cls, costs: Mapping[str, Sequence[float]], num_speculative_tokens: int) -> RoundCosts:
        """Reads {"verify": [...], "draft": [...]}; ConfigError if they are not costs of K
        drafts."""
        for name, length in (
            ("verify", num_speculative_tokens + 1),
            ("draft", num_speculative_tokens),
        ):
            given = costs.get(name, ())
            if len(given) != length or any(not 0 <= cost < np.inf for cost in given):
                raise ConfigError(
                    f"adaptive_verification_costs[{name!r}] is {list(given)}; expected {length}"
                    f" times in any one unit, of 1 to {length}"
                    f" {'tokens per row' if name == 'verify' else 'drafts'}"
                )
        if min(costs["verify"]) <= 0 or len(costs) > 2:
            raise ConfigError(
                f"adaptive_verification_costs={dict(costs)}; expected verify, above 0, and draft"
                " only"
            )
        return cls(costs["verify"], costs["draft"])

    def attach(self, proposer: Proposer, forward: Forward) -> None:
        """Called once; measured costs use both."""

    def of(self, rows: Sequence[Request]) -> tuple[list[float], list[float]]:
        """(V(w + 1), D(w)) [K+1] each, for w = 0 … K drafts of these rows."""
        return self._verify, self._draft

    def learn(
        self, rows: int, depth: int, width: int, draft_time: float, verify_time: float
    ) -> None:
        """After a round that drafted `depth` tokens and verified `width`, in seconds."""


class MeasuredCosts(RoundCosts):
    """Costs measured in the engine that runs the rounds."""

    def __init__(self, num_speculative_tokens: int) -> None:
        self._depth = num_speculative_tokens
        self._curves: dict[
            int, tuple[CostCurve, CostCurve | None]
        ] = {}  # by batch size: V, and D where it takes time

    def attach(self, proposer: Proposer, forward: Forward) -> None:
        self._proposer, self._forward = proposer, forward

    def of(self, rows: Sequence[Request]) -> tuple[list[float], list[float]]:
        size = len(rows)
        if size not in self._curves:
            near = min(self._curves, key=lambda other: max(other / size, size / other), default=0)
            if near and max(near / size, size / near) <= SHARED_RATIO:
                self._curves[size] = deepcopy(self._curves[near])
            else:
                self._curves[size] = self._measure(rows)
        verify, draft = self._curves[size]
        return verify.figures(), (
            [0.0] * (self._depth + 1)
            if draft is None
            else [
                0.0,
                *draft.figures(),
            ]
        )

    def learn(
        self, rows: int, depth: int, width: int, draft_time: float, verify_time: float
    ) -> None:
        verify, draft = self._curves[rows]
        verify.learn(width, verify_time)
        if depth and draft is not None:
            draft.learn(depth - 1, draft_time)

    def _measure(self, rows: Sequence[Request]) -> tuple[CostCurve, CostCurve | None]:
        most = self._depth
        widths = sorted({0, 1, 2, 3, most // 2, (3 * most) // 4, most} & set(range(most + 1)))
        parts: dict[tuple[str, int], Callable[[], object]] = {
            ("verify", w): partial(self._forward, len(rows), w + 1) for w in widths
        }
        drafts = sorted({1, most})
        if rehearses := self._proposer.rehearse(rows, most):
            parts |= {("draft", k): partial(self._proposer.rehearse, rows, k) for k in drafts}
        best = dict.fromkeys(parts, np.inf)
        deadline = perf_counter() + MEASURING_SECONDS
        for repeat in range(-1, MAX_REPEATS):  # the first one warms up
            for part, run in parts.items():
                started = perf_counter()
                run()
                if repeat >= 0:
                    best[part] = min(best[part], perf_counter() - started)
            if repeat >= MIN_REPEATS - 1 and perf_counter() > deadline:
                break
        verify = _between(range(most + 1), widths, [best["verify", w] for w in widths])
        if not rehearses:
            return CostCurve(verify), None
        return CostCurve(verify), CostCurve(
            _between(range(1, most + 1), drafts, [best["draft", k] for k in drafts])
        )


class CostCurve:
    """Seconds by width, above 0, corrected by every round.

    On a shared machine a round may take half as long again as the next, and a width that is used in
    a slow moment must not look expensive beside the others. So a round moves all figures alike;
    what is particular to its width moves it slowly, and its neighbours with it; and more tokens
    never take less time."""

    def __init__(self, seconds: Sequence[float]) -> None:
        self._log = [math.log(x) for x in seconds]
        self._rounds = [0] * len(seconds)

    def figures(self) -> list[float]:
        """[n] seconds, never falling."""
        up, down = accumulate(self._log, max), [*accumulate(reversed(self._log), min)]
        return [
            math.exp((most + least) / 2) for most, least in zip(up, reversed(down), strict=True)
        ]

    def learn(self, place: int, seconds: float) -> None:
        """A round of that width took `seconds`."""
        if seconds <= 0:
            return
        error = math.log(seconds) - self._log[place]
        if not any(
            self._rounds
        ):  # what belongs to a round and to no forward: sampling, bookkeeping
            self._log = [x + error for x in self._log]
        else:
            error = min(max(error, -MAX_LOG_ERROR), MAX_LOG_ERROR)
            own = max(WIDTH_RATE / (WIDTH_ROUNDS + self._rounds[place]), MIN_WIDTH_RATE)
            self._log = [
                x + error * (COMMON_RATE + own * NEIGHBOUR_RATE ** abs(other - place))
                for other, x in enumerate(self._log)
            ]
        self._rounds[place] += 1


def _between(places: Sequence[int], known: Sequence[int], figures: Sequence[float]) -> list[float]:
    """Interpolates the figures at `known` to all places, never falling."""
    return np.interp(places, known, np.maximum.accumulate(figures)).tolist()
