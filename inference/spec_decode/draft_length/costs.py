"""What a round costs: V(n), a forward of the target over n tokens per row, and D(k), drafting k tokens per row.

Measured where they are spent: the first round of a batch size runs forwards of several widths over the rows as they
are, at the context they have, rolls them back by not counting them, and takes the best of interleaved repeats (what
disturbs a forward only ever makes it longer). From then on every round corrects the figures
(inference/spec_decode/draft_length/cost_curve.py), since contexts grow and machines slow down. Or given, and then never
changed, which makes draft lengths a function of the text alone. Must not know what the costs are used for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from time import perf_counter

import numpy as np

from inference.requests.request import Request
from inference.spec_decode.draft_length.cost_curve import CostCurve
from inference.spec_decode.proposers.base import Proposer
from speculators.errors import ConfigError

Forward = Callable[[int, int], None]  # (rows, tokens per row): one forward over rows as they are, and waits for it

BUDGET = 0.5  # seconds that measuring one batch size may take, where three repeats of each part take less
LEAST_REPEATS, REPEATS = 3, 9
ALIKE = 1.5  # batch sizes within this ratio share what was measured


class RoundCosts:
    """The same at every batch size: `verify` V(1) … V(K+1), `draft` D(1) … D(K), in any one unit."""

    def __init__(self, verify: Sequence[float], draft: Sequence[float]) -> None:
        self._verify, self._draft = [float(cost) for cost in verify], [0.0, *map(float, draft)]

    @classmethod
    def given(cls, costs: Mapping[str, Sequence[float]], num_speculative_tokens: int) -> RoundCosts:
        """From {"verify": [...], "draft": [...]}; ConfigError if they are not costs of K drafts."""
        for name, length in (("verify", num_speculative_tokens + 1), ("draft", num_speculative_tokens)):
            found = costs.get(name, ())
            if len(found) != length or any(not 0 <= cost < np.inf for cost in found):
                raise ConfigError(
                    f"adaptive_verification_costs[{name!r}] is {list(found)}; expected {length} times in any one unit, "
                    f"of 1 to {length} {'tokens per row' if name == 'verify' else 'drafts'}"
                )
        if min(costs["verify"]) <= 0 or len(costs) > 2:
            raise ConfigError(f"adaptive_verification_costs={dict(costs)}; expected verify, above 0, and draft only")
        return cls(costs["verify"], costs["draft"])

    def attach(self, proposer: Proposer, forward: Forward) -> None:
        """What could be measured with."""

    def of(self, rows: Sequence[Request]) -> tuple[list[float], list[float]]:
        """(V(w + 1), D(w)) [K+1] each, for w = 0 … K drafts of these rows."""
        return self._verify, self._draft

    def learn(self, rows: int, depth: int, width: int, draft_time: float, verify_time: float) -> None:
        """After a round that drafted `depth` tokens and verified `width`, in seconds."""


class MeasuredCosts(RoundCosts):
    """Of the engine that runs the rounds."""

    def __init__(self, num_speculative_tokens: int) -> None:
        self._depth = num_speculative_tokens
        self._curves: dict[int, tuple[CostCurve, CostCurve | None]] = {}  # by batch size: V, and D where it takes time

    def attach(self, proposer: Proposer, forward: Forward) -> None:
        self._proposer, self._forward = proposer, forward

    def of(self, rows: Sequence[Request]) -> tuple[list[float], list[float]]:
        size = len(rows)
        if size not in self._curves:
            near = min(self._curves, key=lambda other: max(other / size, size / other), default=0)
            if near and max(near / size, size / near) <= ALIKE:
                self._curves[size] = deepcopy(self._curves[near])
            else:
                self._curves[size] = self._measure(rows)
        verify, draft = self._curves[size]
        return verify.figures(), [0.0] * (self._depth + 1) if draft is None else [0.0, *draft.figures()]

    def learn(self, rows: int, depth: int, width: int, draft_time: float, verify_time: float) -> None:
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
        deadline = perf_counter() + BUDGET
        for repeat in range(-1, REPEATS):  # the first one warms up
            for part, run in parts.items():
                started = perf_counter()
                run()
                if repeat >= 0:
                    best[part] = min(best[part], perf_counter() - started)
            if repeat >= LEAST_REPEATS - 1 and perf_counter() > deadline:
                break
        verify = _between(range(most + 1), widths, [best["verify", w] for w in widths])
        if not rehearses:
            return CostCurve(verify), None
        return CostCurve(verify), CostCurve(_between(range(1, most + 1), drafts, [best["draft", k] for k in drafts]))


def _between(places: Sequence[int], known: Sequence[int], figures: Sequence[float]) -> list[float]:
    """Figures of all places, from those that are known, never falling."""
    return np.interp(places, known, np.maximum.accumulate(figures)).tolist()
