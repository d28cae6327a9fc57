"""What `/metrics` says: Prometheus collectors under vLLM's names and labels, so that its dashboards fit.

A "request" here is one response, as in vLLM: a prompt with n=2 counts twice. Times are in seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from inference.metrics import EngineCounters, SpecDecodeCounters
from inference.requests.request import Request
from inference.sampling_params import SamplingParams

LABELS = ("model_name", "engine")
ENGINE = "0"  # vLLM numbers its engines; here there is one
REASONS = ("stop", "length", "abort", "error")
QUEUE_LIMIT = "max_num_queued_reqs"

# The bounds that vLLM's histograms have.
LATENCY_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
FIRST_TOKEN_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
INTER_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
RESPONSES = (1, 2, 5, 10, 20)

# Field of EngineCounters -> what it counts; the names with vLLM's prefix.
ENGINE_COUNTERS = {
    "prefix_cache_queries": "Prompt tokens looked for among those computed before",
    "prefix_cache_hits": "Prompt tokens that were computed before",
    "num_preemptions": "Requests that gave their memory back and waited again",
}
SPECULATIVE_COUNTERS = {
    "num_drafts": "Verified proposals",
    "num_draft_tokens": "Tokens proposed",
    "num_accepted_tokens": "Proposed tokens that were committed",
}
PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos"
PER_POSITION_BY_DRAFTER = "draftsmith:spec_decode_num_accepted_tokens_per_pos"


class DraftersSeen(Protocol):
    """`counters` of each drafter by its name; `most_drafts` of any of them at a time, None: there was none."""

    counters: dict[str, SpecDecodeCounters]
    most_drafts: int | None


class ServerMetrics:
    def __init__(self, model_name: str, max_model_len: int) -> None:
        self.registry = CollectorRegistry()
        self._labels = {"model_name": model_name, "engine": ENGINE}
        tokens = _one_two_five(max_model_len)
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests that were begun")
        self.generation_tokens = self._counter("generation_tokens", "Tokens written")
        self._success = Counter(
            "vllm:request_success", "Finished requests", (*LABELS, "finished_reason"), registry=self.registry
        )
        for reason in REASONS:
            self._success.labels(**self._labels, finished_reason=reason)
        rejections = Counter(
            "vllm:admission_rejections", "Requests refused by a limit of the queue", ("model_name", "reason"),
            registry=self.registry,
        )  # fmt: skip
        self.rejections = rejections.labels(model_name=model_name, reason=QUEUE_LIMIT)
        self.time_to_first_token = self._histogram(
            "time_to_first_token_seconds", "Until the first token", FIRST_TOKEN_S
        )
        self.inter_token_latency = self._histogram("inter_token_latency_seconds", "Between rounds", INTER_TOKEN_S)
        self._per_token = self._histogram("request_time_per_output_token_seconds", "Mean per token", INTER_TOKEN_S)
        self._e2e = self._histogram("e2e_request_latency_seconds", "From arrival to the end", LATENCY_S)
        self._queue = self._histogram("request_queue_time_seconds", "Waiting for a row", LATENCY_S)
        self._inference = self._histogram("request_inference_time_seconds", "In a row", LATENCY_S)
        self._prefill = self._histogram("request_prefill_time_seconds", "Prompt and first token", LATENCY_S)
        self._decode = self._histogram("request_decode_time_seconds", "After the first token", LATENCY_S)
        self._prompt_length = self._histogram("request_prompt_tokens", "Tokens of a prompt", tokens)
        self._written = self._histogram("request_generation_tokens", "Tokens of a response", tokens)
        self._params_n = self._histogram("request_params_n", "Responses asked for", RESPONSES)
        self._params_max_tokens = self._histogram("request_params_max_tokens", "max_tokens asked for", tokens)

    def watch(
        self, running: Callable[[], int], waiting: Callable[[], int], usage: Callable[[], float],
        counters: Callable[[], EngineCounters], drafters: DraftersSeen,
    ) -> None:  # fmt: skip
        """What is read when somebody asks: `usage` of memory for keys and values is between 0 and 1."""
        gauges = {
            "num_requests_running": ("Requests that have a row", running),
            "num_requests_waiting": ("Requests that wait for a row", waiting),
            "kv_cache_usage_perc": ("Memory for keys and values in use; 1 is all of it", usage),
        }
        for name, (text, read) in gauges.items():
            gauge = Gauge(f"vllm:{name}", text, LABELS, registry=self.registry)
            gauge.labels(**self._labels).set_function(read)
        self.registry.register(_EngineCollector(counters, drafters, list(self._labels.values())))

    def first_token(self, request: Request, seconds: float) -> None:
        self.prompt_tokens.inc(request.num_prompt_tokens)
        self.time_to_first_token.observe(seconds)

    def finished(self, params: SamplingParams, requests: Sequence[Request], scheduled: Sequence[float]) -> None:
        """All responses to one prompt have ended, each with its finish_reason; `scheduled`: when each got a row."""
        self._params_n.observe(params.n)
        for request, start in zip(requests, scheduled, strict=True):
            reason = request.finish_reason or "abort"
            self._success.labels(**self._labels, finished_reason=reason).inc()
            end, first = request.finished_time, request.first_token_time
            if end is None or first is None:  # it never had a row, or broke
                continue
            written = len(request.output_token_ids)
            self._e2e.observe(end - request.arrival_time)
            self._queue.observe(start - request.arrival_time)
            self._prefill.observe(first - start)
            self._decode.observe(end - first)
            self._inference.observe(end - start)
            self._per_token.observe((end - first) / (written - 1) if written > 1 else 0)
            self._prompt_length.observe(request.num_prompt_tokens)
            self._written.observe(written)
            if params.max_tokens is not None:
                self._params_max_tokens.observe(params.max_tokens)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"vllm:{name}", text, LABELS, registry=self.registry).labels(**self._labels)

    def _histogram(self, name: str, text: str, bounds: Sequence[float]) -> Histogram:
        return Histogram(f"vllm:{name}", text, LABELS, registry=self.registry, buckets=bounds).labels(**self._labels)


class _EngineCollector(Collector):
    """The engine's own totals, read when asked for."""

    def __init__(self, counters: Callable[[], EngineCounters], drafters: DraftersSeen, labels: Sequence[str]) -> None:
        self._counters, self._drafters, self._labels = counters, drafters, labels

    def collect(self) -> Iterator[Metric]:
        counters = self._counters()
        for name, text in ENGINE_COUNTERS.items():
            yield self._family(f"vllm:{name}", text, getattr(counters, name))
        most = self._drafters.most_drafts
        if most is None:  # nothing was ever drafted (as in vLLM)
            return
        yield from self._by_drafter()
        for name, text in SPECULATIVE_COUNTERS.items():
            yield self._family(f"vllm:spec_decode_{name}", text, getattr(counters, name))
        counts = list(counters.num_accepted_tokens_per_pos)
        counts += [0] * (most - len(counts))
        family = CounterMetricFamily(PER_POSITION, "Accepted by place in the proposal", labels=(*LABELS, "position"))
        for position, count in enumerate(counts):
            family.add_metric([*self._labels, str(position)], count)
        yield family

    def _by_drafter(self) -> Iterator[Metric]:
        """Under names of our own: vLLM's are the totals."""
        drafters = dict(self._drafters.counters)
        labels = (*LABELS, "drafter")
        for name, text in SPECULATIVE_COUNTERS.items():
            family = CounterMetricFamily(f"draftsmith:spec_decode_{name}", f"{text}, by drafter", labels=labels)
            for drafter, counters in drafters.items():
                family.add_metric([*self._labels, drafter], getattr(counters, name))
            yield family
        family = CounterMetricFamily(PER_POSITION_BY_DRAFTER, "Accepted by place", labels=(*labels, "position"))
        for drafter, counters in drafters.items():
            for position, count in enumerate(counters.num_accepted_tokens_per_pos):
                family.add_metric([*self._labels, drafter, str(position)], count)
        yield family

    def _family(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=LABELS)
        family.add_metric(self._labels, value)
        return family


def _one_two_five(most: int) -> list[float]:
    """1, 2, 5, 10, 20, … up to `most`."""
    return [m * 10**e for e in range(len(str(most))) for m in (1, 2, 5) if m * 10**e <= most]
