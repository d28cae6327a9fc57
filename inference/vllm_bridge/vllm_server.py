"""Running vLLM servers as a measured engine: one that drafts, and optionally one of the same target
that does not.

Prompts go as token ids to `/v1/completions`, and token ids come back. The server that drafts
reports every round of a response (`--per-request-spec-decode-metrics detailed`); from these and the
response's length follow the drafts that were committed, where every round has a proposal."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai

from draftsmith.inference.evaluation.engines import Drafting, MeasuredEngine, Prompts
from draftsmith.inference.outputs import RequestOutput
from draftsmith.inference.report.schema import EngineFacts
from draftsmith.inference.sampling_params import SamplingParams
from draftsmith.inference.vllm_bridge.counters import metrics_of, response_of, sizes_of
from draftsmith.inference.vllm_bridge.vllm_engine import (
    VLLM,
    VllmError,
    ending_token_ids,
    sampling_fields,
)
from draftsmith.speculators.errors import ConfigError

KEY = "VLLM_API_KEY"  # environment variable of a server's key, as vLLM itself reads it
FLAG = "--per-request-spec-decode-metrics detailed"
TIMEOUT_S = 600.0  # of a response


class Server:
    """One server: its model and its completions. VllmError if it does not answer."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.client = openai.OpenAI(
            base_url=f"{self.url}/v1",
            api_key=os.environ.get(KEY) or "none",
            timeout=TIMEOUT_S,
            max_retries=0,
        )
        self.model = self._asked(self.client.models.list).data[0].id

    def get(self, route: str) -> str:
        return self._asked(self.client.get, f"{self.url}{route}", cast_to=str)

    def complete(self, prompt: Sequence[int], fields: Mapping[str, Any]) -> Any:
        """One response, with its token ids."""
        body = {"return_token_ids": True, **fields}
        create = self.client.completions.create
        answer = self._asked(create, model=self.model, prompt=list(prompt), extra_body=body)
        if getattr(answer.choices[0], "token_ids", None) is None:
            raise VllmError("answers without token_ids", where=self.url)
        return answer

    def _asked(self, call: Any, *arguments: Any, **fields: Any) -> Any:
        try:
            return call(*arguments, **fields)
        except openai.OpenAIError as error:
            hint = f"is it running, and is this its address? Its key is read from ${KEY}"
            raise VllmError(f"{error}; {hint}", where=self.url) from None


class VllmServer(MeasuredEngine):
    """`url`: a server that drafts. `baseline_url`: one of the same target that does not; None:
    there is none, and what needs one is not measured."""

    def __init__(self, drafting: Drafting, url: str, baseline_url: str | None = None) -> None:
        super().__init__(drafting)
        if drafting.drafter is None:
            raise ConfigError(
                f"a server does not report the rounds of {drafting.method} that have no draft;"
                " leave it out, and a vLLM is started",
                where="--url",
            )
        self.server = Server(url)
        self.baseline = Server(baseline_url) if baseline_url else None
        self.drafting_off = self.baseline is not None
        self.end = ending_token_ids(drafting, self.tokenizer)

    def prepare(self, prompts: Prompts, max_tokens: int) -> None:
        if self.baseline is not None and "spec_decode_num_drafts" in self.baseline.get("/metrics"):
            raise ConfigError("this server drafts too", where=f"--baseline-url {self.baseline.url}")
        self.version = json.loads(self.server.get("/version"))["version"]
        k = self.drafting.num_speculative_tokens
        answer = self.server.complete(prompts[0], {"temperature": 0, "max_tokens": k + 2})
        *_, drafted = self._report(answer)
        if drafted != k:
            raise ConfigError(
                f"drafts {drafted} tokens a round, and {k} are to be measured; give -k {drafted}",
                where=self.server.url,
            )

    def _report(self, answer: Any) -> tuple[list[int], list[int], int]:
        """Of a response: drafts accepted and drafted in each round, and K."""
        report = (getattr(answer, "metrics", None) or {}).get("speculative_decoding") or {}
        accepted = report.get("per_step_accepted") or []
        if len(accepted) != report.get("num_spec_steps"):
            raise ConfigError(f"reports no rounds; start it with {FLAG}", where=self.server.url)
        return accepted, report.get("per_step_drafted") or [], report["num_spec_tokens"]

    def facts(self) -> EngineFacts:
        return EngineFacts(name=VLLM, version=self.version, url=self.server.url)

    def in_float32(self, rows: int) -> None:
        return None

    def _write(
        self, prompts: Prompts, params: Sequence[SamplingParams], speculate: bool
    ) -> list[RequestOutput]:
        server = self.server if speculate else self.baseline
        assert server is not None
        fields = [sampling_fields(one, self.end) for one in params]
        with ThreadPoolExecutor(min(len(prompts), self.drafting.rows)) as pool:
            answers = list(pool.map(server.complete, prompts, fields))
        outputs = []
        for prompt, answer in zip(prompts, answers, strict=True):
            choice, metrics = answer.choices[0], None
            if speculate:
                accepted, drafted, _ = self._report(answer)
                sizes = sizes_of(len(choice.token_ids), accepted)
                metrics = metrics_of(sizes, accepted, drafted)
            outputs.append(response_of(prompt, choice.token_ids, choice.finish_reason, metrics))
        return outputs

    def stop(self) -> None:
        for server in filter(None, (self.server, self.baseline)):
            server.client.close()
