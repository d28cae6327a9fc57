"""Prometheus metrics of the server under vLLM's names and labels: what load generators and
dashboards read of them.

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

LABELS = ("model_name", "engine")
ENGINE = "0"  # vLLM numbers its engines; here there is one
REASONS = ("stop", "length", "abort", "error")
SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)
SPECULATIVE_COUNTERS = {  # fields of SpecDecodeCounters
    "num_drafts": "Verified proposals",
    "num_draft_tokens": "Tokens proposed",
    "num_accepted_tokens": "Proposed tokens that were committed",
}


class ServerMetrics:
    """`in_flight`: the responses that run or wait."""

    def __init__(self, model_name: str, llm: LLM, in_flight: Callable[[], int]) -> None:
        self.registry = CollectorRegistry()
        self._labels = {"model_name": model_name, "engine": ENGINE}
        self._prompt_tokens = self._labelled(Counter, "prompt_tokens", "Prompt tokens read")
        self._generation_tokens = self._labelled(Counter, "generation_tokens", "Tokens generated")
        self._first_token = self._seconds("time_to_first_token", "From arrival on")
        self._next_token = self._seconds("inter_token_latency", "Between two rounds")
        self._latency = self._seconds("e2e_request_latency", "From arrival to the end")
        self._success = Counter(
            "vllm:request_success",
            "Finished requests",
            (*LABELS, "finished_reason"),
            registry=self.registry,
        )
        for reason in REASONS:
            self._success.labels(**self._labels, finished_reason=reason)
        self.rejections = self._labelled(Counter, "admission_rejections", "Refused: queue full")
        labels = list(self._labels.values())
        self.registry.register(_EngineCollector(llm, in_flight, labels))

    def _labelled(self, kind: Callable[..., Any], name: str, text: str, **options: Any) -> Any:
        return kind(f"vllm:{name}", text, LABELS, registry=self.registry, **options).labels(
            **self._labels
        )

    def _seconds(self, name: str, text: str) -> Any:
        return self._labelled(Histogram, f"{name}_seconds", text, buckets=SECONDS)

    def tokens(self, request: Request, before: int, seconds: float) -> None:
        """Counts new tokens of a response that had `before`, `seconds` after the last ones or its
        arrival."""
        if before == 0:
            self._prompt_tokens.inc(request.num_prompt_tokens)
        (self._next_token if before else self._first_token).observe(seconds)
        self._generation_tokens.inc(len(request.token_ids) - request.num_prompt_tokens - before)

    def finished(self, request: Request) -> None:
        """Counts a response that has ended."""
        reason = request.finish_reason or "abort"
        self._success.labels(**self._labels, finished_reason=reason).inc()
        if request.finished_time is not None and request.first_token_time is not None:
            self._latency.observe(request.finished_time - request.arrival_time)


@dataclass(eq=False)
class _EngineCollector(Collector):
    """The state and totals of the engine, read at each scrape."""

    llm: LLM
    in_flight: Callable[[], int]
    labels: Sequence[str]

    def collect(self) -> Iterator[Metric]:
        engine = self.llm.engine
        running, counters = list(engine.scheduler.running), engine.counters
        tokens = sum(len(request.token_ids) for request in running)
        usage = tokens / (engine.scheduler.max_num_seqs * engine.max_model_len)
        yield self._gauge("num_requests_running", "Requests that have a row", len(running))
        waiting = max(0, self.in_flight() - len(running))
        yield self._gauge("num_requests_waiting", "Requests that wait for a row", waiting)
        yield self._gauge("kv_cache_usage_perc", "Keys and values in use; 1 is all", usage)
        if engine.proposer is None:  # as in vLLM
            return
        for name, text in SPECULATIVE_COUNTERS.items():
            family = CounterMetricFamily(f"vllm:spec_decode_{name}", text, labels=LABELS)
            family.add_metric(self.labels, getattr(counters, name))
            yield family
        per_position = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Accepted by position in the proposal",
            labels=(*LABELS, "position"),
        )
        counts = list(counters.num_accepted_tokens_per_pos)
        counts += [0] * (engine.proposer.num_speculative_tokens - len(counts))
        for position, count in enumerate(counts):
            per_position.add_metric([*self.labels, str(position)], count)
        yield per_position

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"vllm:{name}", text, labels=LABELS)
        family.add_metric(self.labels, value)
        return family
