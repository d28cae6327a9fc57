"""Costs of a round: V(n), a forward of the target over n tokens per row, and D(k), drafting k
tokens per row.

They are given, which makes draft lengths a function of the text alone; or measured, in the first
round of a batch size that is far from those measured before (`LLM.warm_up` runs such rounds before
any request): forwards of several widths over the rows at the context they have are timed, and the
best of interleaved repeats is taken, as a disturbance only ever makes a forward longer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import perf_counter

import numpy as np

from draftsmith.inference.requests.request import Request
from draftsmith.inference.spec_decode.proposers.base import Proposer
from draftsmith.speculators.errors import ConfigError

Forward = Callable[[int, int], None]  # (rows, tokens per row): a forward, and waits for it

MEASURING_SECONDS = 0.5  # per batch size, unless MIN_REPEATS of each part take longer
MIN_REPEATS, MAX_REPEATS = 3, 9
SHARED_RATIO = 1.5  # a batch size within this ratio of one that was measured has its costs

GivenCosts = Mapping[str, Sequence[float]]
VerifyAndDraft = tuple[list[float], list[float]]  # V(w + 1) and D(w) for w = 0 … K


class RoundCosts:
    """`given`: {"verify": [V(1), …, V(K+1)], "draft": [D(1), …, D(K)]} in any one unit, of all
    batch sizes. None: measured in the engine that runs the rounds, in seconds."""

    def __init__(self, num_speculative_tokens: int, given: GivenCosts | None = None) -> None:
        """ConfigError if `given` are not the costs of K drafts."""
        self._most = num_speculative_tokens
        self._given = None if given is None else _checked(given, num_speculative_tokens)
        self._measured: dict[int, VerifyAndDraft] = {}  # by batch size
        self._proposer: Proposer | None = None
        self._forward: Forward | None = None

    def attach(self, proposer: Proposer, forward: Forward) -> None:
        """Called once, by the engine whose rounds are measured."""
        self._proposer = proposer
        self._forward = forward

    def sizes(self, most_rows: int) -> list[int]:
        """Batch sizes, ascending, that are measured for all of 1 to `most_rows`: each is twice the
        one before, since all between n and 2 n are within √2 < SHARED_RATIO of one of these. None
        where costs are given."""
        if self._given is not None:
            return []
        sizes = [1]
        while sizes[-1] < most_rows:
            sizes.append(min(2 * sizes[-1], most_rows))
        return sizes

    def of(self, rows: Sequence[Request]) -> VerifyAndDraft:
        """(V(w + 1), D(w)) [K+1] each, for w = 0 … K drafts of these rows."""
        if self._given is not None:
            return self._given
        size = len(rows)
        # Of sizes that were timed themselves, never of one that has another's costs: size by size
        # a batch that fills would keep those of its first rows.
        ratios = {other: max(other / size, size / other) for other in self._measured}
        nearest = min(ratios, key=ratios.__getitem__, default=None)
        if nearest is not None and ratios[nearest] <= SHARED_RATIO:
            return self._measured[nearest]
        self._measured[size] = self._measure(rows)
        return self._measured[size]

    def _measure(self, rows: Sequence[Request]) -> VerifyAndDraft:
        assert self._proposer is not None and self._forward is not None  # the engine's, attached
        most = self._most
        propose = self._proposer.rehearse
        widths = sorted({0, 1, 2, 3, most // 2, (3 * most) // 4, most} & set(range(most + 1)))
        depths = sorted({1, most})
        parts: dict[tuple[str, int], Callable[[], object]] = {
            ("verify", w): partial(self._forward, len(rows), w + 1) for w in widths
        }
        drafting_takes_time = propose(rows, most)
        if drafting_takes_time:
            parts |= {("draft", k): partial(propose, rows, k) for k in depths}
        best = dict.fromkeys(parts, math.inf)
        deadline = perf_counter() + MEASURING_SECONDS
        for repeat in range(-1, MAX_REPEATS):  # the first one warms up
            for part, run in parts.items():
                started = perf_counter()
                run()
                if repeat >= 0:
                    best[part] = min(best[part], perf_counter() - started)
            if repeat >= MIN_REPEATS - 1 and perf_counter() > deadline:
                break
        verify = _between(most, widths, [best["verify", w] for w in widths])
        if not drafting_takes_time:
            return verify, [0.0] * (most + 1)
        draft = _between(most, depths, [best["draft", k] for k in depths])
        return verify, [0.0, *draft[1:]]


def _between(most: int, known: Sequence[int], seconds: Sequence[float]) -> list[float]:
    """Interpolates the seconds at `known` to 0 … most, never falling."""
    return np.interp(range(most + 1), known, np.maximum.accumulate(seconds)).tolist()


def _checked(costs: GivenCosts, k: int) -> VerifyAndDraft:
    verify, draft = list(costs.get("verify", ())), list(costs.get("draft", ()))
    sound = all(0 <= cost < math.inf for cost in (*verify, *draft)) and min(verify, default=0)
    if (len(verify), len(draft)) != (k + 1, k) or not sound or len(costs) != 2:
        raise ConfigError(
            f"adaptive_verification_costs={dict(costs)}; expected verify, {k + 1} times above 0"
            f" of 1 to {k + 1} tokens per row, and draft, {k} times of 1 to {k} drafts"
        )
    return verify, [0.0, *draft]
