"""Running vLLM servers as a measured engine: one that drafts, and perhaps one of the same target that does not.

Prompts go as token ids to `/v1/completions`, and tokens come back. What was accepted the server says with each response
if it was started with `--per-request-spec-decode-metrics`; otherwise requests are sent one at a time and its `/metrics`
are read before and after each. It counts accepted drafts past the end of a response; they are taken away where it says
in which round they were (`detailed`), and otherwise counted apart.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx2

from inference.evaluation.engines import Drafting, MeasuredEngine, Prompts
from inference.outputs import RequestMetrics, RequestOutput
from inference.report.schema import EngineFacts
from inference.sampling_params import SamplingParams
from inference.vllm_bridge.counters import counted_past_end, metrics_of, response_of, sizes_of
from inference.vllm_bridge.engine import VLLM, VllmError, ending_token_ids, sampling_fields, unsound
from speculators.errors import ConfigError, DataError

KEY = "VLLM_API_KEY"  # environment variable of a server's key, as vLLM itself reads it
PREFIX = "vllm:spec_decode_num_"
FINISHED = "vllm:request_success"
PATIENCE = 10.0  # seconds for a finished response to be counted
PROBES, PROBE_TOKENS = 5, 24
RESPONSE_TIMEOUT = 600.0  # seconds
_LINE = re.compile(r"^(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>[^\s]+)")
_POSITION = re.compile(r'position="(\d+)"')


@dataclass
class ServerCounters:
    """What `/metrics` says of drafting, over all engines behind the server. `per_pos`: None without a drafter."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    per_pos: list[int] | None = None
    finished: int = 0

    @classmethod
    def parse(cls, text: str) -> ServerCounters:
        """From Prometheus' text format; counters end with `_total` there."""
        totals: dict[str, float] = {}
        places: dict[int, float] = {}
        for line in text.splitlines():
            match = _LINE.match(line)
            if match is None:
                continue
            name, value = match["name"].removesuffix("_total"), float(match["value"])
            if name == f"{PREFIX}accepted_tokens_per_pos" and (place := _POSITION.search(match["labels"] or "")):
                places[int(place[1])] = places.get(int(place[1]), 0.0) + value
            else:
                totals[name] = totals.get(name, 0.0) + value
        return cls(
            num_drafts=int(totals.get(f"{PREFIX}drafts", 0)),
            num_draft_tokens=int(totals.get(f"{PREFIX}draft_tokens", 0)),
            per_pos=[int(places[k]) for k in sorted(places)] or None,
            finished=int(totals.get(FINISHED, 0)),
        )


@dataclass
class VllmServers:
    """`url`: a server that drafts. `baseline_url`: one of the same target that does not; None: there is none, and what
    needs one is not measured."""

    url: str
    baseline_url: str | None = None

    def __call__(self, drafting: Drafting) -> VllmServer:
        return VllmServer(drafting, Server(self.url), Server(self.baseline_url) if self.baseline_url else None)


@dataclass
class Server:
    """The routes of one server that are needed. VllmError names what it did not answer."""

    url: str
    model: str = field(init=False)
    max_model_len: int | None = field(init=False)
    client: Any = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.url = self.url.rstrip("/").removesuffix("/v1")
        key = os.environ.get(KEY)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.client = httpx2.Client(base_url=self.url, headers=headers, timeout=RESPONSE_TIMEOUT, trust_env=False)

    def open(self) -> None:
        """Asks which model it serves."""
        models = self._ask("GET", "/v1/models").json()["data"]
        self.model, self.max_model_len = models[0]["id"], models[0].get("max_model_len")

    def version(self) -> str:
        return self._ask("GET", "/version").json()["version"]

    def counters(self) -> ServerCounters:
        return ServerCounters.parse(self._ask("GET", "/metrics").text)

    def complete(self, prompt: Sequence[int], fields: Mapping[str, Any]) -> dict[str, Any]:
        """One response, with its token ids."""
        body = {"model": self.model, "prompt": list(prompt), "return_token_ids": True, **fields}
        answer = self._ask("POST", "/v1/completions", json=body).json()
        if answer["choices"][0].get("token_ids") is None:
            raise VllmError(f"{self.url}: the response has no token_ids; serve with a vLLM that knows return_token_ids")
        return answer

    def _ask(self, verb: str, route: str, **content: Any) -> Any:
        try:
            answer = self.client.request(verb, route, **content)
        except httpx2.HTTPError as error:
            raise VllmError(
                f"{self.url}{route}: no answer ({error}); is the server running, and is this its address?"
            ) from None
        if answer.status_code in (401, 403):
            raise VllmError(f"{self.url}{route}: refused ({answer.status_code}); put the server's key in ${KEY}")
        if not answer.is_success:
            raise VllmError(f"{self.url}{route}: {answer.status_code} {answer.text[:500]}")
        return answer


class VllmServer(MeasuredEngine):
    """A server that drafts, and one that does not, if there is one."""

    def __init__(self, drafting: Drafting, server: Server, baseline: Server | None) -> None:
        super().__init__(drafting)
        self.server, self.baseline = server, baseline
        self.drafting_off = baseline is not None
        self.every_round = drafting.drafter is not None  # a matcher has rounds without a proposal
        self.end = ending_token_ids(drafting, self.tokenizer)

    def prepare(self, prompts: Prompts, max_tokens: int, temperatures: Sequence[float]) -> None:
        longest = max(map(len, prompts)) + max_tokens
        for server in filter(None, (self.server, self.baseline)):
            server.open()
            if server.max_model_len is not None and server.max_model_len < longest:
                raise ConfigError(
                    f"{server.url}: serves up to {server.max_model_len} tokens, and the longest prompt and response "
                    f"have {longest}; start it with a larger --max-model-len, or lower --max-tokens"
                )
        self.version = self.server.version()
        found, k = self.server.counters(), self.drafting.num_speculative_tokens
        if found.per_pos is None:
            raise ConfigError(f"{self.server.url}: this server does not draft; start it with --speculative-config")
        if len(found.per_pos) != k:
            raise ConfigError(
                f"{self.server.url}: this server drafts {len(found.per_pos)} tokens a round, and {k} are to be "
                f"measured; give -k {len(found.per_pos)}, or start it with another num_speculative_tokens"
            )
        if self.baseline is not None and self.baseline.counters().per_pos is not None:
            raise ConfigError(f"{self.baseline.url}: this server drafts too; --baseline-url is of one that does not")
        self.tells = told(self.server.complete(prompts[0], {"temperature": 0, "max_tokens": k + 2})) is not None
        if max(temperatures) > 0 and not self._samples_soundly(prompts[:PROBES]):
            raise ConfigError(unsound(self.server.url, temperatures))

    def _samples_soundly(self, prompts: Prompts) -> bool:
        """Whether what is sampled from the most probable token alone (a tiny top_p) is the greedy response, at most
        prompts: a server does not say how it verifies. Single ones may differ by a tie."""
        common = {"max_tokens": PROBE_TOKENS, "ignore_eos": True}
        same = 0
        for seed, prompt in enumerate(prompts):
            greedy = self.server.complete(prompt, common | {"temperature": 0})
            sampled = self.server.complete(prompt, common | {"temperature": 1, "top_p": 1e-6, "seed": seed})
            same += greedy["choices"][0]["token_ids"] == sampled["choices"][0]["token_ids"]
        return 2 * same > len(prompts)

    def facts(self) -> EngineFacts:
        return EngineFacts(name=VLLM, version=self.version, url=self.server.url)

    def in_float32(self, rows: int) -> None:
        return None

    def write(
        self, prompts: Prompts, params: Sequence[SamplingParams], *, speculate: bool, batch: int, counted: bool = True
    ) -> list[RequestOutput]:
        asked = [(list(prompt), sampling_fields(each, self.end)) for prompt, each in zip(prompts, params, strict=True)]
        server = self.server if speculate else self.baseline
        assert server is not None
        if speculate and counted and not self.tells:
            return [self._alone(*each) for each in asked]
        with ThreadPoolExecutor(min(batch, self.drafting.rows)) as threads:
            answers = list(threads.map(lambda each: server.complete(*each), asked))
        outputs = []
        for (prompt, _), answer in zip(asked, answers, strict=True):
            choice = answer["choices"][0]
            block = told(answer) if speculate and counted else None
            metrics = None if block is None else self._metrics(len(choice["token_ids"]), block)
            outputs.append(response_of(prompt, choice["token_ids"], choice["finish_reason"], metrics))
        return outputs

    def _metrics(self, tokens: int, block: Mapping[str, Any]) -> RequestMetrics:
        """From what a response says of its own drafting: rounds in order, or their numbers by accepted drafts."""
        accepted = block.get("per_step_accepted") or []
        if self.every_round and len(accepted) == block["num_spec_steps"]:
            sizes = sizes_of(tokens, accepted)
            if sizes is not None:
                return metrics_of(sizes, accepted, block["per_step_drafted"])
        histogram: list[int] = block["acceptance_histogram"]
        per_pos = [sum(histogram[k:]) for k in range(1, len(histogram))]
        return self._raw(tokens, block["num_spec_steps"], block["num_draft_tokens"], per_pos)

    def _raw(self, tokens: int, drafts: int, drafted: int, per_pos: list[int]) -> RequestMetrics:
        """As the verifier counted; what it counted past the end beside it."""
        return RequestMetrics(
            num_drafts=drafts,
            num_draft_tokens=drafted,
            num_accepted_tokens=sum(per_pos),
            num_accepted_tokens_per_pos=per_pos,
            num_accepted_past_end=counted_past_end(tokens, drafts, sum(per_pos)) if self.every_round else None,
        )

    def _alone(self, prompt: list[int], fields: Mapping[str, Any]) -> RequestOutput:
        """One request while no other runs, counted by what the server's totals grow by."""
        before = self.server.counters()
        choice = self.server.complete(prompt, fields)["choices"][0]
        after, waited_until = self.server.counters(), time.monotonic() + PATIENCE
        while after.finished <= before.finished and time.monotonic() < waited_until:
            time.sleep(0.02)
            after = self.server.counters()
        if after.finished != before.finished + 1:
            raise DataError(
                f"{self.server.url}: {after.finished - before.finished} requests ended while one was asked for, so its "
                "counters are not those of this evaluation; keep others off the server, or start it with "
                "--per-request-spec-decode-metrics detailed"
            )
        per_pos = [a - b for a, b in zip(after.per_pos or (), before.per_pos or (), strict=True)]
        drafts, drafted = after.num_drafts - before.num_drafts, after.num_draft_tokens - before.num_draft_tokens
        metrics = self._raw(len(choice["token_ids"]), drafts, drafted, per_pos)
        return response_of(prompt, choice["token_ids"], choice["finish_reason"], metrics)

    def stop(self) -> None:
        for server in filter(None, (self.server, self.baseline)):
            server.client.close()


def told(answer: Mapping[str, Any]) -> dict[str, Any] | None:
    """What a response says of its drafting; None if the server was not started to."""
    return (answer.get("metrics") or {}).get("speculative_decoding")
