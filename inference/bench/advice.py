"""Which K to serve with: from gains by concurrency and K to options of a `speculative_config` for
vLLM and for this project, and to flags of SGLang and llama.cpp. Pure functions."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

SCHEDULE = "num_speculative_tokens_per_batch_size"
LARGEST_BATCH = 512  # end of the last range; both engines go on with its K above it


def best(gains: Mapping[int, float]) -> int:
    """The K of the largest gain; of equal ones the smallest. 0 gains nothing, unless a drafter that
    waits was measured."""
    known = {0: 1.0, **gains}
    return max(sorted(known), key=lambda tokens: known[tokens])


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


def advised_lengths(gains: Mapping[int, Mapping[int, float]]) -> dict[str, Any] | None:
    """`num_speculative_tokens`, and with it SCHEDULE where not all batch sizes have the same K;
    None: serve without a drafter. `gains`: tokens/s ÷ those without a drafter, by concurrency and
    K."""
    ranges = schedule([(level, best(gains[level])) for level in sorted(gains)])
    most = max(tokens for *_, tokens in ranges)
    if not most:
        return None
    return {"num_speculative_tokens": most} | ({SCHEDULE: ranges} if len(ranges) > 1 else {})


def engine_flags(advice: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(engine, flags) for an advice. SGLang and llama.cpp hold one K: they get that of each range
    of batch sizes, as an engine of its own."""
    given = json.dumps(advice)
    lines = [("vLLM, Draftsmith", f"--speculative-config '{{…, {given[1:-1]}}}'")]
    whole = [[1, LARGEST_BATCH, advice["num_speculative_tokens"]]]
    for smallest, largest, tokens in advice.get(SCHEDULE, whole):
        batch = "" if SCHEDULE not in advice else f", {smallest} to {largest} requests"
        sglang = f"--speculative-num-steps {tokens} --speculative-eagle-topk 1"
        sglang += f" --speculative-num-draft-tokens {tokens + 1}"
        off = "start it without a drafter"
        lines.append((f"SGLang{batch}", sglang if tokens else off))
        lines.append((f"llama.cpp{batch}", f"--spec-draft-n-max {tokens}" if tokens else off))
    return lines
