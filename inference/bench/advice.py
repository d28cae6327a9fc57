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
    """`num_speculative_tokens`, and with it SCHEDULE where not all batch sizes have the same K:
    ranges from 1 on without gaps, with a boundary at the geometric mean of two levels. None: serve
    without a drafter. `gains`: tokens/s ÷ those without a drafter, by concurrency and K."""
    levels = sorted(gains)
    ends = [math.isqrt(level * following) for level, following in itertools.pairwise(levels)]
    ends.append(max(LARGEST_BATCH, levels[-1]))
    ranges: list[list[int]] = []
    smallest = 1
    for level, largest in zip(levels, ends, strict=True):
        known = {0: 1.0, **gains[level]}  # 0 gains nothing, unless a drafter that waits does
        tokens = max(sorted(known), key=known.__getitem__)  # of equal ones the smallest
        if ranges and ranges[-1][2] == tokens:
            ranges[-1][1] = largest
        else:
            ranges.append([smallest, largest, tokens])
        smallest = largest + 1
    most = max(tokens for *_, tokens in ranges)
    if not most:
        return None
    return {"num_speculative_tokens": most} | ({SCHEDULE: ranges} if len(ranges) > 1 else {})
