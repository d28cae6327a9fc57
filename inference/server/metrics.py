"""Prometheus metrics of the server under vLLM's names and labels: what load generators and
dashboards read of them.

A "request" here is one response, as in vLLM: a prompt with n=2 counts twice. It is counted when it
has ended. Times are in seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from draftsmith.inference.entrypoints.llm import LLM
from draftsmith.inference.requests.request import Request

LABELS = ("model_name", "engine")
REASONS = ("stop", "length", "abort", "error")
SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)


class ServerMetrics(Collector):
    """Counters of ended requests, and the state of the engine as it is at each scrape. `in_flight`:
    the responses that run or wait."""

    def __init__(self, model_name: str, llm: LLM, in_flight: Callable[[], int]) -> None:
        self.registry, self._llm, self._in_flight = CollectorRegistry(), llm, in_flight
        self._labels = (model_name, "0")  # vLLM numbers its engines; here there is one
        self._prompt_tokens = self._made(Counter, "prompt_tokens", "Prompt tokens read")
        self._generation_tokens = self._made(Counter, "generation_tokens", "Tokens generated")
        self._first_token = self._seconds("time_to_first_token", "From arrival on")
        self._per_token = self._seconds("request_time_per_output_token", "After the first one")
        self._latency = self._seconds("e2e_request_latency", "From arrival to the end")
        self.rejections = self._made(Counter, "admission_rejections", "Refused: queue full")
        names = (*LABELS, "finished_reason")
        success = Counter("vllm:request_success", "Ended", names, registry=self.registry)
        self._success = {reason: success.labels(*self._labels, reason) for reason in REASONS}
        self.registry.register(self)

    def _made(self, kind: Callable[..., Any], name: str, text: str, **options: Any) -> Any:
        metric = kind(f"vllm:{name}", text, LABELS, registry=self.registry, **options)
        return metric.labels(*self._labels)

    def _seconds(self, name: str, text: str) -> Any:
        return self._made(Histogram, f"{name}_seconds", text, buckets=SECONDS)

    def finished(self, request: Request) -> None:
        """Counts a response that has ended."""
        self._success[request.finish_reason or "abort"].inc()
        first, end = request.first_token_time, request.finished_time
        if first is None:
            return
        tokens = len(request.token_ids) - request.num_prompt_tokens
        self._prompt_tokens.inc(request.num_prompt_tokens)
        self._generation_tokens.inc(tokens)
        self._first_token.observe(first - request.arrival_time)
        if end is not None:
            self._latency.observe(end - request.arrival_time)
            if tokens > 1:
                self._per_token.observe((end - first) / (tokens - 1))

    def collect(self) -> Iterator[Metric]:
        engine = self._llm.engine
        running = list(engine.scheduler.running)
        tokens = sum(len(request.token_ids) for request in running)
        gauges = {
            "num_requests_running": len(running),
            "num_requests_waiting": max(0, self._in_flight() - len(running)),
            "kv_cache_usage_perc": tokens / (engine.scheduler.max_num_seqs * engine.max_model_len),
        }
        for name, value in gauges.items():
            gauge = GaugeMetricFamily(f"vllm:{name}", name.replace("_", " "), labels=LABELS)
            gauge.add_metric(self._labels, value)
            yield gauge
        if engine.proposer is None:  # as in vLLM
            return
        counters = engine.counters
        for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
            text = name.replace("_", " ")
            family = CounterMetricFamily(f"vllm:spec_decode_{name}", text, labels=LABELS)
            family.add_metric(self._labels, getattr(counters, name))
            yield family
        name, text = "vllm:spec_decode_num_accepted_tokens_per_pos", "by position in the proposal"
        family = CounterMetricFamily(name, text, labels=(*LABELS, "position"))
        counts = list(counters.num_accepted_tokens_per_pos)
        counts += [0] * (engine.proposer.num_speculative_tokens - len(counts))
        for position, count in enumerate(counts):
            family.add_metric([*self._labels, str(position)], count)
        yield family
