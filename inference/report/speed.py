"""Tokens per second and speedups from timed passes: the one definition of every report, card and
table.

A workload's time per token is the median over its repeats, so that a pass during which the machine
paused is not in it. Workloads are pooled as sum of tokens / sum of seconds, and a speedup is the
quotient of two such rates. Below three repeats a median leaves nothing out, and nothing is known of
the spread."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from statistics import median, median_low
from typing import NamedTuple

import numpy as np

from draftsmith.inference.report.schema import Estimate, TimedPass

RESAMPLES = 1000
INTERVAL = (0.05, 0.95)
LEAST_REPEATS = 3  # of an interval, and of a median that leaves a stalled pass out
STALL = 1.7  # times the median of its passes, from which a pass counts as stalled


def rates(passes: Mapping[str, Iterable[TimedPass]], weighted: str) -> dict[str, np.ndarray]:
    """Output tokens per second by kind: the estimate, then every draw of the bootstrap
    [1 + RESAMPLES].

    passes      kind -> its passes, all of the same workloads and repeats
    weighted    the kind whose tokens say how much each workload counts, for all kinds alike

    The bootstrap draws the repeats of every workload anew, the same ones for every kind, because
    passes of one repeat ran in turns: quotients of rates are those of the draws."""
    grouped: dict[str, dict[str, list[TimedPass]]] = {}  # by workload and kind
    for kind, runs in passes.items():
        for run in runs:
            grouped.setdefault(run.workload, {}).setdefault(kind, []).append(run)
    random = np.random.default_rng(0)
    total_tokens = 0.0
    total_seconds = np.zeros((len(passes), 1 + RESAMPLES))
    for by_kind in grouped.values():
        times = np.array([[run.seconds / run.tokens for run in by_kind[kind]] for kind in passes])
        draws = random.integers(times.shape[1], size=(RESAMPLES, times.shape[1]))
        tokens = median(run.tokens for run in by_kind[weighted])
        total_tokens += tokens
        total_seconds[:, 0] += tokens * np.median(times, axis=-1)
        total_seconds[:, 1:] += tokens * np.median(times[:, draws], axis=-1)
    return dict(zip(passes, total_tokens / total_seconds, strict=True))


def estimate(draws: np.ndarray, repeats: int) -> Estimate:
    """Of rates, or of the quotient of two, from this many repeats; without an interval below
    LEAST_REPEATS."""
    if repeats < LEAST_REPEATS:
        return Estimate(value=float(draws[0]), low=None, high=None)
    low, high = np.quantile(draws[1:], INTERVAL).tolist()
    return Estimate(value=float(draws[0]), low=low, high=high)


def how_rounds_ran(runs: Iterable[TimedPass]) -> str:
    """`eager` or `compiled`, the share where a part of the rounds was; empty where it is not
    known."""
    shares = [run.compiled_rounds for run in runs if run.compiled_rounds is not None]
    if not shares:
        return ""
    if min(shares) == max(shares):
        named = {0.0: "eager", 1.0: "compiled"}
        if shares[0] in named:
            return named[shares[0]]
    return f"{sum(shares) / len(shares):.0%} compiled"


def num_repeats(passes: Mapping[str, Iterable[TimedPass]]) -> int:
    """Passes of a kind over a workload; the fewest, if their numbers differ. 0 without passes."""
    counts = Counter((kind, run.workload) for kind, runs in passes.items() for run in runs)
    return min(counts.values(), default=0)


class Stall(NamedTuple):
    """A pass that took `ratio` times the median of the `repeats` passes of its kind and
    workload."""

    kind: str
    run: TimedPass
    ratio: float
    repeats: int


def stalled(passes: Mapping[str, Iterable[TimedPass]]) -> list[Stall]:
    """The passes that took more than STALL times the median of their kind and workload, per token.
    Of two passes the faster one is the median."""
    grouped: dict[tuple[str, str], list[TimedPass]] = {}
    for kind, runs in passes.items():
        for run in runs:
            grouped.setdefault((kind, run.workload), []).append(run)
    stalls: list[Stall] = []
    for (kind, _), runs in grouped.items():
        usual = median_low(run.seconds / run.tokens for run in runs)
        ratios = [run.seconds / run.tokens / usual for run in runs]
        stalls += [
            Stall(kind, run, ratio, len(runs))
            for run, ratio in zip(runs, ratios, strict=True)
            if ratio > STALL
        ]
    return stalls
