"""What a round costs: V(n), a forward of the target over n tokens per row, and D(k), drafting k tokens per row.

Measured where they are spent: the first round of a batch size runs forwards of several widths over the rows as they
are, at the context they have, rolls them back by not counting them, and takes medians of interleaved repeats. From then
on every round corrects the figures, since contexts grow and machines slow down. Or given, and then never changed, which
makes draft lengths a function of the text alone. Must not know what the costs are used for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from inference.proposers.base import Proposer
from inference.request import Request
from speculators.errors import ConfigError

Array = NDArray[np.float64]
Forward = Callable[[int, int], None]  # (rows, tokens per row): one forward over rows as they are, and waits for it

BUDGET = 0.3  # seconds that measuring one batch size may take, where two repeats of each part take less
REPEATS = 7
ALIKE = 1.5  # batch sizes within this ratio share what was measured
DRIFT, OWN = 0.02, 0.1  # how fast all figures, and the one of the width at hand, follow a round's time
WILD = 0.5  # a round further off than this share of its figure counts as that far: a pause of the machine is no cost


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
        if costs["verify"][0] <= 0 or len(costs) > 2:
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
        self._tables: dict[int, tuple[Array, Array]] = {}  # by batch size
        self._rounds: dict[int, int] = {}

    def attach(self, proposer: Proposer, forward: Forward) -> None:
        self._proposer, self._forward = proposer, forward

    def of(self, rows: Sequence[Request]) -> tuple[list[float], list[float]]:
        size = len(rows)
        if size not in self._tables:
            near = min(self._tables, key=lambda other: max(other / size, size / other), default=0)
            if near and max(near / size, size / near) <= ALIKE:
                verify, draft = self._tables[near]
                self._tables[size] = verify.copy(), draft.copy()
            else:
                self._tables[size] = self._measure(rows)
            self._rounds[size] = 0
        verify, draft = self._tables[size]
        return verify.tolist(), draft.tolist()

    def learn(self, rows: int, depth: int, width: int, draft_time: float, verify_time: float) -> None:
        verify, draft = self._tables[rows]
        self._rounds[rows] += 1
        drift = max(DRIFT, 1 / self._rounds[rows])  # the first rounds tell what no forward did: sampling, bookkeeping
        _follow(verify, width, verify_time, drift)
        if depth:
            _follow(draft[1:], depth - 1, draft_time, drift)

    def _measure(self, rows: Sequence[Request]) -> tuple[Array, Array]:
        most = self._depth
        widths = sorted({0, 1, 2, 3, most // 2, (3 * most) // 4, most} & set(range(most + 1)))
        parts: dict[tuple[str, int], Callable[[], object]] = {
            ("verify", w): partial(self._forward, len(rows), w + 1) for w in widths
        }
        if self._proposer.rehearse(rows, most):
            parts |= {("draft", k): partial(self._proposer.rehearse, rows, k) for k in sorted({1, most})}
        times: dict[tuple[str, int], list[float]] = {part: [] for part in parts}
        deadline = perf_counter() + BUDGET
        for repeat in range(-1, REPEATS):  # the first one warms up
            for part, run in parts.items():
                started = perf_counter()
                run()
                if repeat >= 0:
                    times[part].append(perf_counter() - started)
            if repeat >= 1 and perf_counter() > deadline:
                break
        medians = {part: median(values) for part, values in times.items()}
        every = np.arange(most + 1)
        verify = np.interp(every, widths, [medians["verify", w] for w in widths])
        draft = np.zeros(most + 1)
        if ("draft", 1) in medians:
            first, last = medians["draft", 1], max(medians["draft", most], medians["draft", 1])
            draft[1:] = np.linspace(first, last, most)
        return np.maximum.accumulate(verify), draft


def _follow(figures: Array, place: int, found: float, drift: float) -> None:
    """Moves figures [n], in place, by the share that one of them turned out to be off."""
    if not figures[place]:
        return
    most = WILD if drift < 1 else 20.0
    error = min(max(found / figures[place] - 1, -WILD), most)
    figures *= 1 + drift * error
    figures[place] *= 1 + OWN * (1 - drift) * error
