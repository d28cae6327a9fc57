"""Which K to serve with: from gains by concurrency and K to options of a `speculative_config` for
vLLM and for this project. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

SCHEDULE = "num_speculative_tokens_per_batch_size"
LARGEST_BATCH = 512  # end of the last range; both engines go on with its K above it


def best(gains: Mapping[int, Sequence[float]]) -> int:
    """The K of the largest median gain; of equal ones the smallest. 0 gains nothing, unless a
    drafter that waits was measured."""
    medians = {0: 1.0} | {tokens: median(values) for tokens, values in gains.items()}
    return max(sorted(medians), key=lambda tokens: medians[tokens])


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


def advised_lengths(gains: Mapping[int, Mapping[int, Sequence[float]]]) -> dict[str, Any] | None:
    """`num_speculative_tokens`, and with it SCHEDULE where not all batch sizes have the same K;
    None: serve without a drafter. `gains`: of every repeat, by concurrency and K."""
    ranges = schedule([(level, best(gains[level])) for level in sorted(gains)])
    most = max(tokens for *_, tokens in ranges)
    if not most:
        return None
    return {"num_speculative_tokens": most} | ({SCHEDULE: ranges} if len(ranges) > 1 else {})
