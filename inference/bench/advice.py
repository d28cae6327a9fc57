"""Which K to serve with: from speeds by concurrency and K to a `speculative_config` for vLLM and
for this project.

Every speed is divided by that without a drafter of the same repeat, so that what slows the machine
for a while slows both. A gain is the median of these ratios over the repeats, its range their
smallest and largest. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

SCHEDULE = "num_speculative_tokens_per_batch_size"
LARGEST_BATCH = (
    512  # where the last range ends at the latest; both engines go on with its K above it
)


@dataclass(frozen=True)
class LevelSpeeds:
    """Output tokens/s at one concurrency, [repeats] each.

    off    without a drafter
    fixed  by K. 0: a drafter that waits; without it, 0 is as fast as `off`
    """

    concurrency: int
    off: tuple[float, ...]
    fixed: dict[int, tuple[float, ...]]

    def gains(self, tokens: int) -> list[float]:
        """Speed with that K ÷ without a drafter, [repeats]."""
        speeds = self.off if tokens == 0 and 0 not in self.fixed else self.fixed[tokens]
        return ratios(speeds, self.off)

    @property
    def best(self) -> int:
        """The K of the largest gain; of equal ones the smallest."""
        lengths = sorted({0, *self.fixed})
        return max(lengths, key=lambda tokens: (median(self.gains(tokens)), -tokens))


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    return [a / b for a, b in zip(ours, theirs, strict=True)]


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": median(values), "smallest": min(values), "largest": max(values)}


def schedule(chosen: Sequence[tuple[int, int]]) -> list[list[int]]:
    """The value of SCHEDULE for (concurrency, K), ascending: ranges from 1 on without gaps. Between
    two levels of different K the boundary is their geometric mean."""
    ranges: list[list[int]] = []
    smallest = 1
    for i, (level, tokens) in enumerate(chosen):
        last = i == len(chosen) - 1
        largest = max(LARGEST_BATCH, level) if last else math.isqrt(level * chosen[i + 1][0])
        if ranges and ranges[-1][2] == tokens:
            ranges[-1][1] = largest
        else:
            ranges.append([smallest, largest, tokens])
        smallest = largest + 1
    return ranges


def advise(levels: Sequence[LevelSpeeds], config: dict[str, Any]) -> dict[str, Any]:
    """The advice for levels of ascending concurrency. `config`: the speculative_config that was
    measured.

    speculative_config  it, with the K of every batch size; None: serve without a drafter
    off_above           the largest batch that is drafted for; None: all are
    levels              concurrency, K, its gain with its range, and the median gain of every K
    """
    chosen = [(level.concurrency, level.best) for level in levels]
    ranges = schedule(chosen)
    most = max(tokens for *_, tokens in ranges)
    advised: dict[str, Any] | None = None
    if most:
        advised = {name: value for name, value in config.items() if name != SCHEDULE}
        advised["num_speculative_tokens"] = most
        if len(ranges) > 1:
            advised[SCHEDULE] = ranges
    return {
        "speculative_config": advised,
        "off_above": None if ranges[-1][2] else ranges[-1][0] - 1,
        "repeats": len(levels[0].off),
        "levels": [
            {
                "max_concurrency": level.concurrency,
                "num_speculative_tokens": tokens,
                "gain": spread([1.0] * len(level.off) if most == 0 else level.gains(tokens)),
                "median_gains": {
                    str(each): median(level.gains(each)) for each in sorted({0, *level.fixed})
                },
            }
            for level, (_, tokens) in zip(levels, chosen, strict=True)
        ],
    }
