"""Outcomes of requests to figures, under the names of vLLM's `bench serve`. Failed requests are
counted and enter no other figure. A figure without values is None, never 0. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from inference.metrics import SpecDecodeCounters

LATENCIES = {
    "ttft": "time to first token",
    "tpot": "per token after the first",
    "itl": "between pieces of the stream",
    "e2el": "end to end",
    "client_queue_time": "waiting for a free slot",
}
DETAILS = ("input_lens", "output_lens", "ttfts", "itls", "start_times", "generated_texts", "errors")


@dataclass(frozen=True)
class Outcome:
    """The result of one request. Times are in seconds.

    start_time    of sending, on this process's clock
    queue_time    between arrival and sending
    ttft          from sending to the first piece of the answer
    itl           between consecutive pieces; a piece may hold several tokens
    latency       from sending to the last piece
    output_tokens, prompt_len as the server counted them
    """

    success: bool = False
    error: str = ""
    start_time: float = 0.0
    queue_time: float = 0.0
    ttft: float = 0.0
    latency: float = 0.0
    itl: tuple[float, ...] = ()
    prompt_len: int = 0
    output_tokens: int = 0
    text: str = ""


def figures(
    outcomes: Sequence[Outcome],
    duration_s: float,
    metrics: Sequence[str],
    percentiles: Sequence[float],
) -> dict[str, Any]:
    """The fields of vLLM's result. Times are in seconds in lists of requests, and `_ms` where the
    name says so.

    TPOT is (latency - TTFT) / (tokens - 1), over requests of at least two tokens. Throughputs are
    those of requests that succeeded, over `duration_s`."""
    done = [outcome for outcome in outcomes if outcome.success]
    starts_and_ends = [(o.start_time, 1) for o in done] + [
        (o.start_time + o.latency, -1) for o in done
    ]
    prompt_tokens, output_tokens = (
        sum(o.prompt_len for o in done),
        sum(o.output_tokens for o in done),
    )
    result: dict[str, Any] = {
        "duration": duration_s,
        "completed": len(done),
        "failed": len(outcomes) - len(done),
        "total_input_tokens": prompt_tokens,
        "total_output_tokens": output_tokens,
        "request_throughput": len(done) / duration_s,
        "request_goodput": None,
        "output_throughput": output_tokens / duration_s,
        "total_token_throughput": (prompt_tokens + output_tokens) / duration_s,
        "input_lens": [o.prompt_len for o in outcomes],
        "output_lens": [o.output_tokens for o in outcomes],
        "ttfts": [o.ttft for o in outcomes],
        "itls": [list(o.itl) for o in outcomes],
        "latencies": [o.latency for o in outcomes],
        "start_times": [o.start_time for o in outcomes],
        "queue_times": [o.queue_time for o in outcomes],
        "generated_texts": [o.text for o in outcomes],
        "errors": [o.error for o in outcomes],
        "max_output_tokens_per_s": _busiest_second(done),
        "max_concurrent_requests": int(
            np.cumsum([step for _, step in sorted(starts_and_ends)]).max(initial=0)
        ),
    }
    seconds = {
        "ttft": [o.ttft for o in done],
        "tpot": [(o.latency - o.ttft) / (o.output_tokens - 1) for o in done if o.output_tokens > 1],
        "itl": [gap for o in done for gap in o.itl],
        "e2el": [o.latency for o in done],
        "client_queue_time": [o.queue_time for o in done],
    }
    statistics: dict[str, Callable[[Any], Any]] = {
        "mean": np.mean,
        "median": np.median,
        "std": np.std,
    }
    for name in (name for name in LATENCIES if name in metrics):
        ms = 1000 * np.asarray(seconds[name])
        values: dict[str, Any] = {
            kind: function(ms) if len(ms) else None for kind, function in statistics.items()
        }
        values |= {f"p{p:g}": np.percentile(ms, p) if len(ms) else None for p in percentiles}
        result |= {
            f"{kind}_{name}_ms": None if v is None else float(v) for kind, v in values.items()
        }
    return result


def _busiest_second(done: Sequence[Outcome]) -> float:
    """Most tokens within a second counted from the first request. The tokens of an answer are
    spread evenly over the pieces of its stream, because the number of tokens in a piece is not
    known."""
    if not done:
        return 0.0
    first = min(o.start_time for o in done)
    times = [np.cumsum([o.start_time + o.ttft - first, *o.itl]) for o in done]
    tokens = [
        np.full(len(pieces), o.output_tokens / len(pieces))
        for o, pieces in zip(done, times, strict=True)
    ]
    return float(np.bincount(np.concatenate(times).astype(int), np.concatenate(tokens)).max())


def drafting_figures(
    before: SpecDecodeCounters | None, after: SpecDecodeCounters | None
) -> dict[str, Any]:
    """Acceptance between two readings of the server's counters, under vLLM's names; empty if
    nothing was drafted or the counters were reset. The rate is in per cent. Rates by position are
    joint."""
    if before is None or after is None:
        return {}
    between = after.since(before)
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
