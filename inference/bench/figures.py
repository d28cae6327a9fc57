"""Outcomes of requests to figures, under the names of vLLM's `bench serve`. What failed is counted and is in no other
figure; a figure of nothing is None, never 0. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from inference.bench.client import Outcome
from inference.metrics import SpecDecodeCounters

LATENCIES = {
    "ttft": "time to first token",
    "tpot": "per token after the first",
    "itl": "between pieces of the stream",
    "e2el": "end to end",
    "client_queue_time": "waiting here for a turn",
}
DETAILS = ("input_lens", "output_lens", "ttfts", "itls", "start_times", "generated_texts", "errors")


def figures(
    outcomes: Sequence[Outcome], duration_s: float, metrics: Sequence[str], percentiles: Sequence[float]
) -> dict[str, Any]:
    """The fields of vLLM's result. Times are in seconds in lists of requests, and `_ms` where the name says so.

    TPOT is (latency - TTFT) / (tokens - 1), over requests of at least two tokens. Throughputs are those of requests
    that succeeded, over `duration_s`.
    """
    done = [each for each in outcomes if each.success]
    read, written = sum(each.prompt_len for each in done), sum(each.output_tokens for each in done)
    result: dict[str, Any] = {
        "duration": duration_s,
        "completed": len(done),
        "failed": len(outcomes) - len(done),
        "total_input_tokens": read,
        "total_output_tokens": written,
        "request_throughput": len(done) / duration_s,
        "request_goodput": None,
        "output_throughput": written / duration_s,
        "total_token_throughput": (read + written) / duration_s,
        "input_lens": [each.prompt_len for each in outcomes],
        "output_lens": [each.output_tokens for each in outcomes],
        "ttfts": [each.ttft for each in outcomes],
        "itls": [list(each.itl) for each in outcomes],
        "latencies": [each.latency for each in outcomes],
        "start_times": [each.start_time for each in outcomes],
        "queue_times": [each.queue_time for each in outcomes],
        "generated_texts": [each.text for each in outcomes],
        "errors": [each.error for each in outcomes],
        "max_output_tokens_per_s": _busiest_second(done),
        "max_concurrent_requests": _most_at_once(done),
    }
    for name, values in latencies(done).items():
        if name in metrics:
            result |= _spread(name, values, percentiles)
    return result


def latencies(done: Sequence[Outcome]) -> dict[str, list[float]]:
    """Seconds, by vLLM's names; one value a request, ITL one a gap."""
    return {
        "ttft": [each.ttft for each in done],
        "tpot": [(e.latency - e.ttft) / (e.output_tokens - 1) for e in done if e.output_tokens > 1],
        "itl": [gap for each in done for gap in each.itl],
        "e2el": [each.latency for each in done],
        "client_queue_time": [each.queue_time for each in done],
    }


def _spread(name: str, values: Sequence[float], percentiles: Sequence[float]) -> dict[str, float | None]:
    ms = np.asarray(values) * 1000

    def of(function: Any, *arguments: float) -> float | None:
        return float(function(ms, *arguments)) if len(ms) else None

    spread = {f"mean_{name}_ms": of(np.mean), f"median_{name}_ms": of(np.median), f"std_{name}_ms": of(np.std)}
    return spread | {f"p{p:g}_{name}_ms": of(np.percentile, p) for p in percentiles}


def _busiest_second(done: Sequence[Outcome]) -> float:
    """Most tokens that came within a second counted from the first request. The tokens of an answer are spread evenly
    over the pieces of its stream: how many a piece held is not known."""
    if not done:
        return 0.0
    first = min(each.start_time for each in done)
    times, weights = [], []
    for each in done:
        pieces = np.cumsum([each.start_time + each.ttft - first, *each.itl])
        times.append(pieces)
        weights.append(np.full(len(pieces), each.output_tokens / len(pieces)))
    return float(np.bincount(np.concatenate(times).astype(int), np.concatenate(weights)).max())


def _most_at_once(done: Sequence[Outcome]) -> int:
    """Most requests under way at the same time."""
    steps = [(each.start_time, 1) for each in done] + [(each.start_time + each.latency, -1) for each in done]
    most = now = 0
    for _, step in sorted(steps):
        now += step
        most = max(most, now)
    return most


def drafting_figures(before: SpecDecodeCounters | None, after: SpecDecodeCounters | None) -> dict[str, Any]:
    """Acceptance between two looks at the server's counters, under vLLM's names; empty where nothing was drafted, or
    the server began to count anew. The rate is in per cent; rates by position are joint."""
    if before is None or after is None:
        return {}
    old, new = before.num_accepted_tokens_per_pos, after.num_accepted_tokens_per_pos
    between = SpecDecodeCounters(
        after.num_drafts - before.num_drafts,
        after.num_draft_tokens - before.num_draft_tokens,
        after.num_accepted_tokens - before.num_accepted_tokens,
        [count - (old[i] if i < len(old) else 0) for i, count in enumerate(new)],
    )
    if between.num_drafts <= 0 or between.num_draft_tokens <= 0 or between.num_accepted_tokens < 0:
        return {}
    return {
        "spec_decode_acceptance_rate": 100 * between.num_accepted_tokens / between.num_draft_tokens,
        "spec_decode_acceptance_length": between.acceptance_length,
        "spec_decode_num_drafts": between.num_drafts,
        "spec_decode_draft_tokens": between.num_draft_tokens,
        "spec_decode_accepted_tokens": between.num_accepted_tokens,
        "spec_decode_per_position_acceptance_rates": between.joint_rates(),
    }
