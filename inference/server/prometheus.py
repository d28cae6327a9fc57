"""Prometheus metrics of the server under vLLM's names and labels: what load generators read.

A "request" here is one response, as in vLLM: a prompt with n=2 counts twice. It is counted when it
has ended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from draftsmith.inference.entrypoints.text_generator import TextGenerator
from draftsmith.inference.requests.request import Request

REASONS = ("stop", "length", "abort", "error")


class ServerMetrics(Collector):
    """Counters of ended requests, and the state of the engine as it is at each scrape. `in_flight`:
    the responses that run or wait; `running`: those that run."""

    def __init__(
        self,
        model_name: str,
        llm: TextGenerator,
        in_flight: Callable[[], int],
        running: Callable[[], int],
    ) -> None:
        self.registry = CollectorRegistry()
        self._llm = llm
        self._in_flight = in_flight
        self._running = running
        self._labels = {"model_name": model_name, "engine": "0"}  # vLLM numbers its engines
        self._ended = Counter[str]()  # responses by reason
        self._prompt_tokens = 0
        self._generation_tokens = 0
        self.registry.register(self)

    def finished(self, request: Request) -> None:
        """Counts a response that has ended."""
        self._ended[request.finish_reason or "abort"] += 1
        if request.first_token_time is not None:
            self._prompt_tokens += request.num_prompt_tokens
            self._generation_tokens += len(request.output_token_ids)

    def collect(self) -> Iterator[Metric]:
        """The metrics of one scrape; those of drafting only if there is a drafter."""
        engine = self._llm.engine
        running = self._running()
        waiting = max(0, self._in_flight() - running)
        yield self._metric("gauge", "num_requests_running", running)
        yield self._metric("gauge", "num_requests_waiting", waiting)
        yield self._metric("counter", "prompt_tokens", self._prompt_tokens)
        yield self._metric("counter", "generation_tokens", self._generation_tokens)
        by_reason = {reason: self._ended[reason] for reason in REASONS}
        yield self._metric("counter", "request_success", by_reason, "finished_reason")
        if engine.proposer is None:  # as in vLLM
            return
        for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
            yield self._metric("counter", f"spec_decode_{name}", getattr(engine.counters, name))
        accepted = dict.fromkeys(map(str, range(engine.proposer.num_speculative_tokens)), 0)
        accepted |= {str(k): n for k, n in enumerate(engine.counters.num_accepted_tokens_per_pos)}
        name = "spec_decode_num_accepted_tokens_per_pos"
        yield self._metric("counter", name, accepted, "position")
        if by_method := engine.counters.num_drafts_by_method:  # vLLM has no such drafting
            name = "spec_decode_num_drafts_by_method"
            yield self._metric("counter", name, dict(by_method), "method")

    def _metric(self, kind: str, name: str, value: int | dict[str, int], label: str = "") -> Metric:
        """With one value, or one for each value of `label`."""
        metric = Metric(f"vllm:{name}", name.replace("_", " "), kind)
        sample = metric.name + ("_total" if kind == "counter" else "")
        if isinstance(value, dict):
            for key, number in value.items():
                metric.add_sample(sample, self._labels | {label: key}, number)
        else:
            metric.add_sample(sample, self._labels, value)
        return metric
