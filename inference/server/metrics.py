"""Prometheus metrics of the server under vLLM's names and labels, so that its dashboards fit.

A "request" here is one response, as in vLLM: a prompt with n=2 counts twice. Times are in seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from inference.entrypoints.llm import LLM
from inference.requests.request import Request
from inference.sampling_params import SamplingParams

LABELS = ("model_name", "engine")
ENGINE = "0"  # vLLM numbers its engines; here there is one
REASONS = ("stop", "length", "abort", "error")

# Bounds of vLLM's histograms; TOKENS are 1, 2, 5, 10, … up to the model's context.
LATENCY_S = (
    0.3,
    0.5,
    0.8,
    1,
    1.5,
    2,
    2.5,
    5,
    10,
    15,
    20,
    30,
    40,
    50,
    60,
    120,
    240,
    480,
    960,
    1920,
    7680,
)
FIRST_TOKEN_S = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    640,
    2560,
)
INTER_TOKEN_S = (
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
)
RESPONSES = (1, 2, 5, 10, 20)
TOKENS = ()

HISTOGRAMS: dict[str, tuple[str, tuple[float, ...]]] = {
    "time_to_first_token_seconds": ("Until the first token", FIRST_TOKEN_S),
    "inter_token_latency_seconds": ("Between rounds", INTER_TOKEN_S),
    "request_time_per_output_token_seconds": ("Mean per token", INTER_TOKEN_S),
    "e2e_request_latency_seconds": ("From arrival to the end", LATENCY_S),
    "request_queue_time_seconds": ("Waiting for a row", LATENCY_S),
    "request_inference_time_seconds": ("In a row", LATENCY_S),
    "request_prefill_time_seconds": ("Prompt and first token", LATENCY_S),
    "request_decode_time_seconds": ("After the first token", LATENCY_S),
    "request_prompt_tokens": ("Tokens of a prompt", TOKENS),
    "request_generation_tokens": ("Tokens of a response", TOKENS),
    "request_params_n": ("Responses asked for", RESPONSES),
    "request_params_max_tokens": ("max_tokens asked for", TOKENS),
}
GAUGES = {
    "num_requests_running": "Requests that have a row",
    "num_requests_waiting": "Requests that wait for a row",
    "kv_cache_usage_perc": "Memory for keys and values in use; 1 is all of it",
}
ENGINE_COUNTERS = {  # fields of EngineCounters
    "prefix_cache_queries": "Prompt tokens looked for among those computed before",
    "prefix_cache_hits": "Prompt tokens that were computed before",
    "num_preemptions": "Requests that gave their memory back and waited again",
}
SPECULATIVE_COUNTERS = {  # fields of SpecDecodeCounters
    "num_drafts": "Verified proposals",
    "num_draft_tokens": "Tokens proposed",
    "num_accepted_tokens": "Proposed tokens that were committed",
}


class ServerMetrics:
    def __init__(self, model_name: str, max_model_len: int) -> None:
        self.registry = CollectorRegistry()
        self._labels = {"model_name": model_name, "engine": ENGINE}
        powers = [10**e for e in range(len(str(max_model_len)))]
        tokens = [m * power for power in powers for m in (1, 2, 5) if m * power <= max_model_len]
        self._histograms = {
            name: self._labelled(Histogram, name, text, buckets=bounds or tokens)
            for name, (text, bounds) in HISTOGRAMS.items()
        }
        self.inter_token_latency = self._histograms["inter_token_latency_seconds"]
        self.prompt_tokens = self._labelled(
            Counter, "prompt_tokens", "Prompt tokens of requests that were begun"
        )
        self.generation_tokens = self._labelled(Counter, "generation_tokens", "Tokens generated")
        self._success = Counter(
            "vllm:request_success",
            "Finished requests",
            (*LABELS, "finished_reason"),
            registry=self.registry,
        )
        for reason in REASONS:
            self._success.labels(**self._labels, finished_reason=reason)
        self.rejections = Counter(
            "vllm:admission_rejections",
            "Requests refused by a limit of the queue",
            ("model_name", "reason"),
            registry=self.registry,
        ).labels(model_name=model_name, reason="max_num_queued_reqs")

    def _labelled(self, kind: Callable[..., Any], name: str, text: str, **options: Any) -> Any:
        return kind(f"vllm:{name}", text, LABELS, registry=self.registry, **options).labels(
            **self._labels
        )

    def watch(self, llm: LLM, in_flight: Callable[[], int]) -> None:
        """Registers values that are read at each scrape. `in_flight`: responses that run or
        wait."""
        self.registry.register(_EngineCollector(llm, in_flight, list(self._labels.values())))

    def first_token(self, request: Request, seconds: float) -> None:
        self.prompt_tokens.inc(request.num_prompt_tokens)
        self._histograms["time_to_first_token_seconds"].observe(seconds)

    def finished(
        self, params: SamplingParams, requests: Sequence[Request], scheduled: Sequence[float]
    ) -> None:
        """Counts the responses to one prompt, which have ended. `scheduled`: when each got a
        row."""
        self._histograms["request_params_n"].observe(params.n)
        for request, start in zip(requests, scheduled, strict=True):
            reason = request.finish_reason or "abort"
            self._success.labels(**self._labels, finished_reason=reason).inc()
            end, first = request.finished_time, request.first_token_time
            if end is None or first is None:  # it never had a row, or failed
                continue
            written = len(request.output_token_ids)
            values = {
                "e2e_request_latency_seconds": end - request.arrival_time,
                "request_queue_time_seconds": start - request.arrival_time,
                "request_prefill_time_seconds": first - start,
                "request_decode_time_seconds": end - first,
                "request_inference_time_seconds": end - start,
                "request_time_per_output_token_seconds": (
                    (end - first) / (written - 1) if written > 1 else 0
                ),
                "request_prompt_tokens": request.num_prompt_tokens,
                "request_generation_tokens": written,
            }
            if params.max_tokens is not None:
                values["request_params_max_tokens"] = params.max_tokens
            for name, value in values.items():
                self._histograms[name].observe(value)


@dataclass(eq=False)
class _EngineCollector(Collector):
    """The state and totals of the engine."""

    llm: LLM
    in_flight: Callable[[], int]
    labels: Sequence[str]

    def collect(self) -> Iterator[Metric]:
        engine = self.llm.engine
        running, counters = list(engine.scheduler.running), engine.counters
        gauges = {
            "num_requests_running": len(running),
            "num_requests_waiting": max(0, self.in_flight() - len(running)),
            "kv_cache_usage_perc": (
                sum(len(r.token_ids) for r in running)
                / (engine.scheduler.max_num_seqs * engine.max_model_len)
            ),
        }
        for name, value in gauges.items():
            yield _family(
                f"vllm:{name}", GAUGES[name], LABELS, [(self.labels, value)], GaugeMetricFamily
            )
        for name, text in ENGINE_COUNTERS.items():
            yield _family(f"vllm:{name}", text, LABELS, [(self.labels, getattr(counters, name))])
        if engine.proposer is None:  # as in vLLM
            return
        for field, text in SPECULATIVE_COUNTERS.items():
            rows = [(self.labels, getattr(counters, field))]
            yield _family(f"vllm:spec_decode_{field}", text, LABELS, rows)
        counts = list(counters.num_accepted_tokens_per_pos)
        counts += [0] * (engine.proposer.num_speculative_tokens - len(counts))
        positions = [((*self.labels, str(i)), count) for i, count in enumerate(counts)]
        name = "vllm:spec_decode_num_accepted_tokens_per_pos"
        yield _family(name, "Accepted by position", (*LABELS, "position"), positions)


def _family(
    name: str,
    text: str,
    labels: Sequence[str],
    values: Sequence[tuple[Sequence[str], float]],
    kind: Any = CounterMetricFamily,
) -> Metric:
    family = kind(name, text, labels=labels)
    for row, value in values:
        family.add_metric(row, value)
    return family
