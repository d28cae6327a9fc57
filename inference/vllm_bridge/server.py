"""Running vLLM servers as a measured engine: one that drafts, and optionally one of the same target
that does not.

Prompts go as token ids to `/v1/completions`, and token ids come back. A server that was started
with `--per-request-spec-decode-metrics` reports the accepted drafts with each response. With any
other, requests are sent one at a time, and `/metrics` is read before and after each. vLLM counts
accepted drafts past the end of a response. They are subtracted where the server reports every round
(`detailed`), and counted separately elsewhere."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, TypeVar

from anyio.from_thread import start_blocking_portal

from inference.evaluation.engines import Drafting, MeasuredEngine, Prompts
from inference.http_client import ServerClient, drafting_counters
from inference.metrics import SpecDecodeCounters
from inference.outputs import RequestMetrics, RequestOutput
from inference.report.schema import EngineFacts
from inference.sampling_params import SamplingParams
from inference.vllm_bridge.counters import counted_past_end, metrics_of, response_of, sizes_of
from inference.vllm_bridge.engine import VLLM, VllmError, ending_token_ids, sampling_fields, unsound
from speculators.errors import ConfigError, DataError

KEY = "VLLM_API_KEY"  # environment variable of a server's key, as vLLM itself reads it
COUNTED_WITHIN_S = 10.0  # after a response has ended
PROBES, PROBE_TOKENS = 5, 24
RESPONSE_TIMEOUT_S = 600.0

Answer = TypeVar("Answer")


@dataclass
class VllmServers:
    """`url`: a server that drafts. `baseline_url`: one of the same target that does not; None:
    there is none, and what needs one is not measured."""

    url: str
    baseline_url: str | None = None

    def __call__(self, drafting: Drafting) -> VllmServer:
        return VllmServer(
            drafting, Server(self.url), Server(self.baseline_url) if self.baseline_url else None
        )


class Server:
    """One server: its model, its counters and its completions. RequestFailed if it does not
    answer."""

    model: str
    max_model_len: int | None

    def __init__(self, url: str) -> None:
        self.client = ServerClient(url, RESPONSE_TIMEOUT_S, key_env=KEY, trust_env=False)
        self.url = self.client.url

    async def open(self) -> None:
        """Asks which model it serves."""
        card = (await self.client.models())[0]
        self.model, self.max_model_len = card["id"], card.get("max_model_len")

    async def counters(self) -> tuple[SpecDecodeCounters | None, int]:
        """Its drafting counters, None if it does not draft, and the number of finished requests."""
        metrics = await self.client.metrics()
        finished = sum(
            value for name, value in metrics.items() if name.split()[0] == "request_success"
        )
        return drafting_counters(metrics), int(finished)

    async def complete(self, prompt: Sequence[int], fields: Mapping[str, Any]) -> dict[str, Any]:
        """One response, with its token ids."""
        body = {"model": self.model, "prompt": list(prompt), "return_token_ids": True, **fields}
        answer = await self.client.post("/v1/completions", body)
        if answer["choices"][0].get("token_ids") is None:
            raise VllmError(
                f"{self.url}: the response has no token_ids; serve with a vLLM that knows"
                " return_token_ids"
            )
        return answer


class VllmServer(MeasuredEngine):
    """A server that drafts, and one that does not, if there is one."""

    def __init__(self, drafting: Drafting, server: Server, baseline: Server | None) -> None:
        super().__init__(drafting)
        self.server, self.baseline = server, baseline
        self.drafting_off = baseline is not None
        self.every_round = drafting.drafter is not None  # a matcher has rounds without a proposal
        self.end = ending_token_ids(drafting, self.tokenizer)
        self._resources = ExitStack()
        self._portal = self._resources.enter_context(
            start_blocking_portal()
        )  # an event loop in a thread
        for each in filter(None, (server, baseline)):
            self._resources.callback(self._run, each.client.close)

    def _run(self, function: Callable[..., Awaitable[Answer]], *arguments: Any) -> Answer:
        return self._portal.call(function, *arguments)

    def prepare(self, prompts: Prompts, max_tokens: int, temperatures: Sequence[float]) -> None:
        longest = max(map(len, prompts)) + max_tokens
        for server in filter(None, (self.server, self.baseline)):
            self._run(server.open)
            if server.max_model_len is not None and server.max_model_len < longest:
                raise ConfigError(
                    f"{server.url}: serves up to {server.max_model_len} tokens, and the longest"
                    f" prompt and response have {longest}; start it with a larger --max-model-len,"
                    " or lower --max-tokens"
                )
        self.version = self._run(self.server.client.version)
        counters, k = self._run(self.server.counters)[0], self.drafting.num_speculative_tokens
        if counters is None:
            raise ConfigError(
                f"{self.server.url}: this server does not draft; start it with --speculative-config"
            )
        if (drafted := len(counters.num_accepted_tokens_per_pos)) != k:
            raise ConfigError(
                f"{self.server.url}: this server drafts {drafted} tokens a round, and {k} are to be"
                f" measured; give -k {drafted}, or start it with another num_speculative_tokens"
            )
        if self.baseline is not None and self._run(self.baseline.counters)[0] is not None:
            raise ConfigError(
                f"{self.baseline.url}: this server drafts too; --baseline-url is of one that"
                " does not"
            )
        answer = self._run(
            self.server.complete, prompts[0], {"temperature": 0, "max_tokens": k + 2}
        )
        self.reports_drafting = drafting_report(answer) is not None
        if max(temperatures) > 0 and not self._samples_soundly(prompts[:PROBES]):
            raise ConfigError(unsound(self.server.url, temperatures))

    def _samples_soundly(self, prompts: Prompts) -> bool:
        """True if sampling with a tiny top_p, from the most probable token alone, gives the greedy
        response for most prompts: a server does not say how it verifies. Ties may change single
        responses."""

        def tokens(prompt: Sequence[int], **sampling: Any) -> list[int]:
            fields = {"max_tokens": PROBE_TOKENS, "ignore_eos": True, **sampling}
            return self._run(self.server.complete, prompt, fields)["choices"][0]["token_ids"]

        sampled = [
            tokens(prompt, temperature=1, top_p=1e-6, seed=seed)
            for seed, prompt in enumerate(prompts)
        ]
        same = sum(
            tokens(prompt, temperature=0) == found
            for prompt, found in zip(prompts, sampled, strict=True)
        )
        return 2 * same > len(prompts)

    def facts(self) -> EngineFacts:
        return EngineFacts(name=VLLM, version=self.version, url=self.server.url)

    def in_float32(self, rows: int) -> None:
        return None

    def write(
        self,
        prompts: Prompts,
        params: Sequence[SamplingParams],
        *,
        speculate: bool,
        batch: int,
        counted: bool = True,
    ) -> list[RequestOutput]:
        server = self.server if speculate else self.baseline
        assert server is not None
        requests = [
            (prompt, sampling_fields(p, self.end))
            for prompt, p in zip(prompts, params, strict=True)
        ]
        if speculate and counted and not self.reports_drafting:
            return [self._run(self._write_alone, *request) for request in requests]
        answers = self._run(_complete_all, server, requests, min(batch, self.drafting.rows))
        outputs = []
        for prompt, answer in zip(prompts, answers, strict=True):
            choice = answer["choices"][0]
            report = drafting_report(answer) if speculate and counted else None
            metrics = None if report is None else self._metrics(len(choice["token_ids"]), report)
            outputs.append(
                response_of(prompt, choice["token_ids"], choice["finish_reason"], metrics)
            )
        return outputs

    def _metrics(self, tokens: int, report: Mapping[str, Any]) -> RequestMetrics:
        """From a response's own report: accepted drafts of every round, or a histogram of them."""
        accepted = report.get("per_step_accepted") or []
        if self.every_round and len(accepted) == report["num_spec_steps"]:
            sizes = sizes_of(tokens, accepted)
            if sizes is not None:
                return metrics_of(sizes, accepted, report["per_step_drafted"])
        histogram: list[int] = report["acceptance_histogram"]
        per_pos = [sum(histogram[k:]) for k in range(1, len(histogram))]
        return self._raw(tokens, report["num_spec_steps"], report["num_draft_tokens"], per_pos)

    def _raw(self, tokens: int, drafts: int, drafted: int, per_pos: list[int]) -> RequestMetrics:
        """The verifier's counts, with the accepted drafts past the end as a field of their own."""
        return RequestMetrics(
            num_drafts=drafts,
            num_draft_tokens=drafted,
            num_accepted_tokens=sum(per_pos),
            num_accepted_tokens_per_pos=per_pos,
            num_accepted_past_end=(
                counted_past_end(tokens, drafts, sum(per_pos)) if self.every_round else None
            ),
        )

    async def _write_alone(self, prompt: Sequence[int], fields: Mapping[str, Any]) -> RequestOutput:
        """One request while no other runs, counted by the growth of the server's totals."""
        before, finished_before = await self.server.counters()
        choice = (await self.server.complete(prompt, fields))["choices"][0]
        deadline = time.monotonic() + COUNTED_WITHIN_S
        after, finished = await self.server.counters()
        while finished == finished_before and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
            after, finished = await self.server.counters()
        if finished != finished_before + 1:
            raise DataError(
                f"{self.server.url}: {finished - finished_before} requests ended while one was"
                " asked for, so its counters are not those of this evaluation; keep others off the"
                " server, or start it with --per-request-spec-decode-metrics detailed"
            )
        assert before is not None and after is not None, "it drafted when the evaluation began"
        counts = after.since(before)
        metrics = self._raw(
            len(choice["token_ids"]),
            counts.num_drafts,
            counts.num_draft_tokens,
            counts.num_accepted_tokens_per_pos,
        )
        return response_of(prompt, choice["token_ids"], choice["finish_reason"], metrics)

    def stop(self) -> None:
        self._resources.close()


async def _complete_all(
    server: Server, requests: Sequence[tuple[Sequence[int], Mapping[str, Any]]], concurrency: int
) -> list[dict[str, Any]]:
    """Responses in the order of the requests, of which at most `concurrency` run at a time."""
    limit = asyncio.Semaphore(concurrency)

    async def complete(prompt: Sequence[int], fields: Mapping[str, Any]) -> dict[str, Any]:
        async with limit:
            return await server.complete(prompt, fields)

    return await asyncio.gather(*(complete(*request) for request in requests))


def drafting_report(answer: Mapping[str, Any]) -> dict[str, Any] | None:
    """The counters that a server sent with a response. None if it was not started to send them."""
    return (answer.get("metrics") or {}).get("speculative_decoding")
