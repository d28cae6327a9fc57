"""A server by its URL: what is measured over the wire is what is measured here.

The server of these tests speaks the few routes of vLLM's that are used, and counts as vLLM does:
drafts accepted past the end of a response too. What it says is this runtime's own; real vLLM's is
in tests/vllm."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass, field, replace
from functools import partial

import httpx2
import pytest
import torch

from draftsmith.inference import LLM, SamplingParams
from draftsmith.inference.evaluation.evaluate import EvaluationSettings, evaluate
from draftsmith.inference.vllm_bridge import server as bridge
from draftsmith.inference.vllm_bridge.engine import VllmError
from draftsmith.inference.vllm_bridge.server import VllmServer
from draftsmith.speculators.errors import ConfigError
from draftsmith.speculators.export import export_drafter
from draftsmith.speculators.families.eagle3 import Eagle3
from draftsmith.speculators.registry import config_for_target
from draftsmith.speculators.target.frozen_target import FrozenTarget

V, K, LENGTH = 259, 3, 14
SETTINGS = EvaluationSettings(
    temperatures=(0.0,),
    num_speculative_tokens=K,
    max_tokens=LENGTH,
    prompts_per_workload=4,
    timed_prompts=1,
    repeats=1,
    transformers=False,
    cost_trials=1,
    lossless_prompts=0,
)
PROMPTS = {
    name: [[3 + (i * i * 7 + n + seed) % 240 for i in range(n)] for n in (3, 5, 8)]
    for seed, name in enumerate("ab")
}
URL, BASELINE = "http://drafts:8000", "http://plain:8000/v1/"


@pytest.fixture(scope="module")
def folders(tiny_model, byte_tokenizer, tmp_path_factory) -> tuple[str, str]:
    """A target and a head started in closed form: some of its drafts are accepted, and some are
    not."""
    root = tmp_path_factory.mktemp("server")
    model = tiny_model(
        "llama", vocab_size=V, eos_token_id=257, pad_token_id=258, initializer_range=0.1
    )
    model.save_pretrained(root / "target")
    byte_tokenizer.save_pretrained(root / "target")
    target = FrozenTarget(model, [1, 2, 3])
    torch.manual_seed(1)
    config = config_for_target(target, "eagle3", tap_layers=[1, 2, 3])
    drafter = Eagle3(config).attach(target).initialise_from(target)
    export_drafter(drafter, root / "head", dtype=torch.float32)
    return str(root / "target"), str(root / "head")


@dataclass
class FakeVllm:
    """`detail`: of per-request metrics. `drafting`: hosts that do."""

    llm: LLM
    detail: str = "detailed"
    drafting: tuple[str, ...] = ("drafts",)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, request: httpx2.Request) -> httpx2.Response:
        drafts, path = request.url.host in self.drafting, request.url.path
        if path == "/v1/models":
            card = {"id": "m", "object": "model", "created": 0, "owned_by": "vllm"}
            return httpx2.Response(200, json={"data": [card]})
        if path == "/version":
            return httpx2.Response(200, json={"version": "9.9"})
        if path == "/metrics":
            return httpx2.Response(200, text="vllm:spec_decode_num_drafts_total 0" * drafts)
        body = json.loads(request.content)
        assert path == "/v1/completions" and body["model"] == "m" and body["return_token_ids"]
        return httpx2.Response(200, json=self.complete(body, drafts))

    def complete(self, body: dict, drafts: bool) -> dict:
        limit = body["max_tokens"]
        asked = {name: body[name] for name in ("temperature", "top_p", "seed") if name in body}
        params = SamplingParams(max_tokens=limit + K + 1, ignore_eos=True, **asked)
        prompt = [{"prompt_token_ids": body["prompt"]}]
        with self.lock:
            (output,) = self.llm.generate(prompt, params, use_tqdm=False, speculate=drafts)
        accepted, written = [], 1
        for count in output.metrics.accepted_per_round:  # a round more than fits is counted whole
            if written < limit:
                accepted.append(count)
                written += count + 1
        choice = {"index": 0, "text": "", "finish_reason": "length"}
        choice["token_ids"] = output.outputs[0].token_ids[:limit]
        answer = {"id": "a", "object": "text_completion", "created": 0, "choices": [choice]}
        if self.detail != "none" and drafts:
            block = {"num_spec_steps": len(accepted), "num_spec_tokens": K}
            if self.detail == "detailed":
                block |= {"per_step_accepted": accepted, "per_step_drafted": [K] * len(accepted)}
            answer["metrics"] = {"speculative_decoding": block}
        return answer


@pytest.fixture
def measured(folders, monkeypatch):
    """`measured(settings, servers, …)`: the report of an evaluation through a FakeVllm."""
    speculative = {"method": "eagle3", "model": folders[1], "num_speculative_tokens": K}
    llm, openai = LLM(folders[0], speculative_config=speculative), bridge.openai.OpenAI

    def run(settings=SETTINGS, servers=None, **given):
        http = httpx2.Client(transport=httpx2.MockTransport(FakeVllm(llm, **given)))
        client = lambda **options: openai(**options, http_client=http)
        monkeypatch.setattr(bridge.openai, "OpenAI", client)
        return evaluate(*folders, PROMPTS, settings, engine=servers or partial(VllmServer, url=URL))

    return run


@pytest.mark.slow
def test_a_server_is_measured_as_this_runtime(folders, measured) -> None:
    ours = evaluate(*folders, PROMPTS, SETTINGS)
    report = measured(servers=partial(VllmServer, url=URL, baseline_url=BASELINE))
    assert report.provenance.engine == "vllm"
    assert (report.provenance.engines[0].url, report.provenance.engines[0].version) == (URL, "9.9")
    counted = ("prompts", "output_tokens", "num_drafts", "num_draft_tokens", "expected")
    counted += ("num_accepted_tokens_per_pos", "acceptance_by_position")
    for cell in ours.results:
        theirs = report.cell(cell.workload, 0)
        for name in counted:
            assert getattr(theirs, name) == getattr(cell, name), name
        assert [check.mismatches for check in theirs.lossless] == [0]
        assert theirs.speedup_vs_autoregressive is not None


@pytest.mark.slow
def test_servers_that_cannot_be_measured_are_named(measured) -> None:
    flag = "--per-request-spec-decode-metrics"
    for given, named in (
        ({"drafting": ()}, flag),
        ({"detail": "summary"}, flag),
        ({"settings": replace(SETTINGS, num_speculative_tokens=2)}, "-k 3"),
        ({"servers": partial(VllmServer, url=URL, baseline_url=URL)}, "--baseline-url"),
    ):
        with pytest.raises(ConfigError, match=named):
            measured(**given)


def test_a_server_that_is_not_there(folders) -> None:
    servers = partial(VllmServer, url="http://127.0.0.1:9")
    with pytest.raises(ConfigError, match="--url: "):
        evaluate(folders[0], None, PROMPTS, SETTINGS, method="ngram", engine=servers)
    with pytest.raises(VllmError, match="is it running"):
        evaluate(*folders, PROMPTS, SETTINGS, engine=servers)
