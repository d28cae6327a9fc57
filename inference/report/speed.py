"""Tokens per second and speedups from timed passes: the one definition of every report, card and
table.

A workload's time per token is the median over its repeats, so that a pass during which the machine
stalled is not in it. Workloads are pooled as sum of tokens / sum of seconds, and a speedup is the
quotient of two such rates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median

import numpy as np

from draftsmith.inference.report.schema import Estimate, TimedPass

STALLED = 0.6  # a pass below this share of the median rate of its repeats is reported
RESAMPLES = 1000
INTERVAL = (0.05, 0.95)


class Speeds:
    """Rates of several kinds of passes, and their quotients.

    passes      kind -> its passes, all of the same workloads and repeats
    weighted    the kind whose tokens say how much each workload counts, for all kinds alike

    The bootstrap draws the repeats of every workload anew, the same ones for every kind, because
    passes of one repeat ran next to each other."""

    def __init__(self, passes: Mapping[str, Sequence[TimedPass]], weighted: str) -> None:
        grouped = {kind: _by_workload(some) for kind, some in passes.items()}
        self.kinds = list(grouped)
        random = np.random.default_rng(0)
        total_tokens = 0.0
        total_seconds = np.zeros((len(grouped), 1 + RESAMPLES))  # the estimate, then every draw
        for workload, own in grouped[weighted].items():
            groups = [groups.get(workload, []) for groups in grouped.values()]
            times = np.array([[run.seconds / run.tokens for run in group] for group in groups])
            draws = random.integers(times.shape[1], size=(RESAMPLES, times.shape[1]))
            tokens = median(run.tokens for run in own)
            total_tokens += tokens
            total_seconds[:, 0] += tokens * np.median(times, axis=-1)
            total_seconds[:, 1:] += tokens * np.median(times[:, draws], axis=-1)
        rates = total_tokens / total_seconds
        self._rates = dict(zip(self.kinds, rates, strict=True))  # of each kind [1 + RESAMPLES]

    def rates(self) -> dict[str, Estimate]:
        """Output tokens per second by kind."""
        return {kind: _estimate(values) for kind, values in self._rates.items()}

    def ratio(self, kind: str, reference: str) -> Estimate | None:
        """Rate of `kind` / rate of `reference`; None if one of them was not timed."""
        if not {kind, reference} <= set(self.kinds):
            return None
        return _estimate(self._rates[kind] / self._rates[reference])


def stalled(passes: Iterable[TimedPass]) -> list[tuple[TimedPass, float]]:
    """The passes of one kind that were slower than STALLED of the median rate of their workload,
    each with that median in tokens per second."""
    slow = []
    for group in _by_workload(passes).values():
        usual = median(run.tokens / run.seconds for run in group)
        slow += [(run, usual) for run in group if run.tokens / run.seconds < STALLED * usual]
    return slow


def _by_workload(passes: Iterable[TimedPass]) -> dict[str, list[TimedPass]]:
    groups: dict[str, list[TimedPass]] = {}
    for run in passes:
        groups.setdefault(run.workload, []).append(run)
    return groups


def _estimate(values: np.ndarray) -> Estimate:
    low, high = np.quantile(values[1:], INTERVAL).tolist()
    return Estimate(value=float(values[0]), low=low, high=high)
