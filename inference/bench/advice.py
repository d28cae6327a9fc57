"""Which K to serve with: from gains by concurrency and K to options of a `speculative_config` for
vLLM and for this project. Pure functions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

SCHEDULE = "num_speculative_tokens_per_batch_size"
LARGEST_BATCH = 512  # end of the last range; both engines go on with its K above it


def advised_lengths(gains: Mapping[int, Mapping[int, float]]) -> dict[str, Any] | None:
    """`num_speculative_tokens`, and with it SCHEDULE where not all batch sizes have the same K.
    None: serve without a drafter. `gains`: tokens/s ÷ those without a drafter, by concurrency and
    K."""
    best = {level: _best_length(gains[level]) for level in sorted(gains)}
    most = max(best.values())
    if most == 0:
        return None
    advice: dict[str, Any] = {"num_speculative_tokens": most}
    schedule = _schedule(best)
    if len(schedule) > 1:
        advice[SCHEDULE] = schedule
    return advice


def _best_length(gains: Mapping[int, float]) -> int:
    """The K that gains most, of equal ones the smallest. K = 0 drafts nothing, and gains nothing
    unless it was measured, of a server whose drafter waits."""
    gain_of = {0: 1.0, **gains}
    return max(sorted(gain_of), key=gain_of.__getitem__)


def _schedule(best: Mapping[int, int]) -> list[list[int]]:
    """[first, last, K] of ranges of batch sizes, from 1 on without gaps. `best`: K by concurrency,
    in rising order. Two ranges meet at the geometric mean of their levels, since it is the ratio of
    two batch sizes that says how alike they are."""
    levels = list(best)
    ends = [math.isqrt(level * following) for level, following in itertools.pairwise(levels)]
    ends.append(max(LARGEST_BATCH, levels[-1]))
    ranges: list[list[int]] = []
    first = 1
    for level, last in zip(levels, ends, strict=True):
        if ranges and ranges[-1][2] == best[level]:
            ranges[-1][1] = last
        else:
            ranges.append([first, last, best[level]])
        first = last + 1
    return ranges
