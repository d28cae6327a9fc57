"""A server by its URL: what is measured over the wire is what is measured here.

The server of these tests speaks the few routes of vLLM's that are used, and counts as vLLM does:
drafts accepted past the end of a response too. What it says is this runtime's own; real vLLM's is
in tests/vllm."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

from inference import LLM, SamplingParams
from inference.evaluation.evaluate import EvaluationSettings, evaluate
from inference.http_client import RequestFailed
from inference.vllm_bridge.server import VllmServers
from speculators.errors import ConfigError, DataError
from speculators.export import export_drafter
from speculators.families.eagle3 import Eagle3
from speculators.registry import config_for_target
from speculators.target.frozen_target import FrozenTarget

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
    drafter = (
        Eagle3(config_for_target(target, "eagle3", tap_layers=[1, 2, 3]))
        .attach(target)
        .initialise_from(target)
    )
    export_drafter(drafter, root / "head", dtype=torch.float32)
    return str(root / "target"), str(root / "head")


class FakeVllm:
    """`detail` of per-request metrics: none, summary or detailed. `others`: requests of others that
    end meanwhile. `careless`: reads no top_p."""

    def __init__(
        self,
        llm: LLM,
        *,
        detail: str = "none",
        drafts: bool = True,
        others: int = 0,
        careless: bool = False,
    ):
        self.llm, self.detail, self.drafts, self.others, self.careless = (
            llm,
            detail,
            drafts,
            others,
            careless,
        )
        self.finished, self.rounds, self.lock = 0, [], threading.Lock()

    def complete(self, body: dict) -> dict:
        limit = body["max_tokens"]
        asked = {name: body[name] for name in ("temperature", "top_p", "seed") if name in body}
        if self.careless:
            asked.pop("top_p", None)
        params = SamplingParams(max_tokens=limit + K + 1, ignore_eos=True, **asked)
        with self.lock:
            output = self.llm.generate(
                [{"prompt_token_ids": body["prompt"]}],
                params,
                use_tqdm=False,
                speculate=self.drafts,
            )[0]
        accepted, written = [], 1
        for count in output.metrics.accepted_per_round:  # a round more than fits is counted whole
            if written < limit:
                accepted.append(count)
                written += count + 1
        self.finished += 1 + self.others
        self.rounds += accepted if self.drafts else []
        answer = {
            "choices": [
                {"token_ids": output.outputs[0].token_ids[:limit], "finish_reason": "length"}
            ]
        }
        if self.detail != "none" and self.drafts:
            block = {
                "num_spec_steps": len(accepted),
                "num_draft_tokens": K * len(accepted),
                "acceptance_histogram": [accepted.count(j) for j in range(K + 1)],
            }
            if self.detail == "detailed" and accepted:
                block |= {"per_step_accepted": accepted, "per_step_drafted": [K] * len(accepted)}
            answer["metrics"] = {"speculative_decoding": block}
        return answer

    def metrics(self) -> str:
        name = 'engine="0",model_name="m"'
        lines = [
            f'vllm:request_success_total{{finished_reason="length",{name}}} {float(self.finished)}'
        ]
        if self.drafts:
            lines.append(f"vllm:spec_decode_num_drafts_total{{{name}}} {float(len(self.rounds))}")
            lines.append(
                f"vllm:spec_decode_num_draft_tokens_total{{{name}}} {float(K * len(self.rounds))}"
            )
            lines += [
                f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{name},position="{k}"}} '
                f"{float(sum(count > k for count in self.rounds))}"
                for k in range(K)
            ]
        return "\n".join(lines) + "\n"


@pytest.fixture
def served(folders):
    """`served(**options)`: the address of a FakeVllm on loopback."""
    running = []
    speculative = {"method": "eagle3", "model": folders[1], "num_speculative_tokens": K}
    llm = LLM(folders[0], speculative_config=speculative)

    def start(**options) -> str:
        fake = FakeVllm(llm, **options)

        class Handler(BaseHTTPRequestHandler):
            def answer(self, body: str) -> None:
                data = body.encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def do_GET(self) -> None:
                models = {"data": [{"id": "m", "max_model_len": 64}]}
                routes = {"/version": {"version": "9.9"}, "/v1/models": models}
                self.answer(
                    fake.metrics() if self.path == "/metrics" else json.dumps(routes[self.path])
                )

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                assert (
                    self.path == "/v1/completions"
                    and body["model"] == "m"
                    and body["return_token_ids"]
                )
                self.answer(json.dumps(fake.complete(body)))

            def log_message(self, *_: object) -> None: ...

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        running.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in running:
        server.shutdown()
        server.server_close()


@pytest.fixture(scope="module")
def ours(folders):
    return evaluate(*folders, PROMPTS, SETTINGS)


def counted(cell) -> tuple:
    return (
        cell.prompts,
        cell.output_tokens,
        cell.num_drafts,
        cell.num_draft_tokens,
        cell.num_accepted_tokens_per_pos,
    )


@pytest.mark.slow
def test_a_server_that_tells_all_is_measured_as_this_runtime(folders, served, ours) -> None:
    url, baseline = served(detail="detailed"), served(drafts=False)
    report = evaluate(*folders, PROMPTS, SETTINGS, engine=VllmServers(url, baseline + "/v1/"))
    assert report.provenance.engine == "vllm" and report.provenance.engines[0].url == url
    for cell in ours.results:
        theirs = report.cell(cell.workload, 0)
        assert counted(theirs) == counted(cell)
        assert theirs.acceptance_by_position == cell.acceptance_by_position
        assert theirs.expected == cell.expected and theirs.num_accepted_past_end == 0
        assert [check.mismatches for check in theirs.lossless] == [0]
        assert theirs.speedup_vs_autoregressive is not None


@pytest.mark.parametrize("detail", ["none", "summary"])
def test_what_a_server_counts_past_the_end_is_counted_apart(folders, served, ours, detail) -> None:
    report = evaluate(*folders, PROMPTS, SETTINGS, engine=VllmServers(served(detail=detail)))
    past_end = 0
    for cell in ours.results:
        theirs = report.cell(cell.workload, 0)
        assert counted(theirs)[:4] == counted(cell)[:4]
        assert theirs.num_accepted_tokens - theirs.num_accepted_past_end == cell.num_accepted_tokens
        assert theirs.committed_acceptance_length == pytest.approx(cell.acceptance_length)
        assert theirs.lossless == [] and theirs.tokens_per_second.autoregressive is None
        past_end += theirs.num_accepted_past_end
    assert past_end > 0, "responses that end with a round prove nothing"


def test_counters_that_others_move_are_refused(folders, served) -> None:
    with pytest.raises(DataError, match="2 requests ended while one was asked for"):
        evaluate(*folders, PROMPTS, SETTINGS, engine=VllmServers(served(others=1)))


@pytest.mark.slow
def test_sampling_is_measured_only_where_the_server_does_it_right(folders, served) -> None:
    sampled = replace(SETTINGS, temperatures=(0.0, 1.0), max_tokens=6)
    with pytest.raises(ConfigError, match="what it accepts at 1 means nothing"):
        evaluate(
            *folders, PROMPTS, sampled, engine=VllmServers(served(detail="detailed", careless=True))
        )
    report = evaluate(*folders, PROMPTS, sampled, engine=VllmServers(served(detail="detailed")))
    assert report.cell("all", 1).num_drafts > 0
    assert report.cell("all", 1).expected is None  # how it draws its drafts is not known


@pytest.mark.slow
def test_servers_that_cannot_be_measured_are_named(folders, served) -> None:
    for settings, options, words in (
        (SETTINGS, {"drafts": False}, "does not draft; start it with --speculative-config"),
        (
            replace(SETTINGS, num_speculative_tokens=2),
            {},
            "drafts 3 tokens a round, and 2 are to be measured; give -k 3",
        ),
        (
            replace(SETTINGS, max_tokens=60),
            {},
            "serves up to 64 tokens, and the longest prompt and response have 68",
        ),
    ):
        with pytest.raises(ConfigError, match=words):
            evaluate(*folders, PROMPTS, settings, engine=VllmServers(served(**options)))
    with pytest.raises(ConfigError, match="this server drafts too"):
        evaluate(*folders, PROMPTS, SETTINGS, engine=VllmServers(served(), served()))
    with pytest.raises(RequestFailed, match="is the server running"):
        evaluate(*folders, PROMPTS, SETTINGS, engine=VllmServers("http://127.0.0.1:9"))
