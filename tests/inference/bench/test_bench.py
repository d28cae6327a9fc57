"""The load generator against servers of known timing, and against the project's own."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import shlex
from collections import Counter
from dataclasses import dataclass, field

import httpx2
import numpy as np
import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from draftsmith.inference.bench import load
from draftsmith.inference.bench.advice import SCHEDULE, advised_lengths, best
from draftsmith.inference.bench.datasets import Question, load_questions
from draftsmith.inference.bench.load import (
    Outcome,
    Work,
    arrival_times,
    drafting_results,
    latency_results,
    measure,
    read_counters,
)
from draftsmith.inference.bench.options import BenchOptions
from draftsmith.inference.entrypoints.speculative_config import parse_speculative_config
from draftsmith.inference.flags import given_values, validated
from draftsmith.inference.metrics import SpecDecodeCounters
from draftsmith.inference.spec_decode.draft_length import DraftLength
from draftsmith.speculators.errors import ConfigError, DataError, DraftsmithError
from draftsmith.train.cli import app

LATE_S = 0.8  # what a busy machine may add to a time


@dataclass(frozen=True)
class Script:
    """How the server answers: pieces of (seconds before it, tokens in it); a fault: "status",
    "error", "cut"."""

    pieces: tuple[tuple[float, int], ...]
    fault: str = ""


@dataclass
class FakeServer:
    """Streams what the scripts say, in the order in which requests come, and keeps their bodies.
    Drafting: every piece of n tokens was a proposal of `k` drafts of which n-1 were accepted."""

    scripts: list[Script]
    usage: bool = True
    k: int = 0
    bodies: list[dict] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)
    running: Counter = field(default_factory=Counter)

    async def __call__(self, request: httpx2.Request) -> httpx2.Response:
        if request.url.path == "/v1/models":
            card = {"id": "fake", "object": "model", "created": 0, "owned_by": "x"}
            return httpx2.Response(200, json={"data": [card | {"root": "a/fake"}]})
        if request.url.path == "/metrics":
            return httpx2.Response(200 if self.k else 404, text=self.metrics())
        self.bodies.append(json.loads(request.content))
        # the first request warms the server up
        script = self.scripts[max(0, len(self.bodies) - 2) % len(self.scripts)]
        if script.fault == "status":
            return httpx2.Response(429, json={"error": {"message": "no room"}})
        form = {"content-type": "text/event-stream"}
        return httpx2.Response(200, headers=form, content=self.stream(script))

    async def stream(self, script: Script):
        self.running["now"] += 1
        self.running["most"] = max(self.running.values())
        chat = "messages" in self.bodies[-1]
        if chat:
            yield event(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}}])
        for i, (wait, tokens) in enumerate(script.pieces):
            await asyncio.sleep(wait)
            last = i == len(script.pieces) - 1
            if script.fault and last:
                self.running["now"] -= 1
                if script.fault == "cut":
                    raise httpx2.ReadError("gone")
                yield event(error={"message": "it broke"})
            self.drafts.append(tokens - 1)
            text = "x" * tokens
            said = {"delta": {"content": text}} if chat else {"text": text}
            yield event(choices=[{"index": 0, "finish_reason": "length" if last else None, **said}])
        count = {"prompt_tokens": 3, "completion_tokens": sum(n for _, n in script.pieces)}
        if self.usage:
            yield event(choices=[], usage=count)
        self.running["now"] -= 1
        yield b"data: [DONE]\n\n"

    def metrics(self) -> str:
        totals = {"drafts": len(self.drafts), "draft_tokens": self.k * len(self.drafts)}
        totals["accepted_tokens"] = sum(self.drafts)
        lines = [f"vllm:spec_decode_num_{name}_total {value}.0" for name, value in totals.items()]
        for i in range(self.k):
            count = sum(accepted > i for accepted in self.drafts)
            name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
            lines.append(f'{name}{{position="{i}"}} {count}.0')
        return "\n".join(lines) + "\n"


def event(**fields) -> bytes:
    return f"data: {json.dumps({'id': 'a', 'object': 'x', 'model': 'fake', **fields})}\n\n".encode()


@pytest.fixture
def fake(monkeypatch):
    """`fake(scripts, …)`: a FakeServer that every client of the load generator reaches."""

    def start(*given, **more) -> FakeServer:
        server = FakeServer(*given, **more)

        def client(**_):
            return httpx2.AsyncClient(transport=httpx2.MockTransport(server))

        monkeypatch.setattr(load.openai, "DefaultAsyncHttpxClient", client)
        return server

    return start


def work(count: int, chat: bool = False) -> Work:
    prompts = [[{"role": "user", "content": f"{i}"}] if chat else f"{i}" for i in range(count)]
    return Work([Question(prompt, 8) for prompt in prompts], "fake")


def options(**given) -> BenchOptions:
    more = {"dataset_name": "custom", "dataset_path": "unread.jsonl", "backend": "openai"}
    return BenchOptions(**(more | given))


# ------------------------------------------------------------ times and counts of streams

pieces = st.lists(
    st.tuples(st.sampled_from([0.0, 0.02, 0.05]), st.integers(1, 5)), min_size=1, max_size=5
)
scripts = st.lists(pieces.map(lambda p: Script(tuple(p))), min_size=1, max_size=4)


@pytest.mark.slow
def test_figures_are_those_of_the_streams(fake):
    """Tokens are those of the usage, however many a piece holds; times are never shorter than the
    server took."""

    @settings(max_examples=6, deadline=None)
    @given(scripts, st.booleans(), st.sampled_from([None, 1, 2]))
    def check(scripts, chat, concurrency):
        server = fake(scripts, k=4)
        backend = "openai-chat" if chat else "openai"
        asked = options(max_concurrency=concurrency, backend=backend)
        result = measure(asked, work(len(scripts), chat))
        tokens = [sum(n for _, n in script.pieces) for script in scripts]
        waits = [sum(wait for wait, _ in script.pieces) for script in scripts]
        assert (result["completed"], result["failed"]) == (len(scripts), 0)
        assert result["total_output_tokens"] == sum(tokens)
        assert result["total_input_tokens"] == 3 * len(scripts)
        assert sorted(map(len, result["generated_texts"])) == sorted(tokens)
        first = [script.pieces[0][0] for script in scripts]
        for name, seconds in (("ttft", first), ("e2el", waits)):
            mean = np.mean(seconds)
            assert mean - 0.005 <= result[f"mean_{name}_ms"] / 1000 < mean + LATE_S
        assert result["output_throughput"] * result["duration"] == pytest.approx(sum(tokens))
        assert server.running["most"] <= (concurrency or len(scripts))
        drafts = server.drafts[len(scripts[0].pieces) :]  # but those of the warm-up
        assert result["spec_decode_num_drafts"] == len(drafts)
        length = 1 + sum(drafts) / len(drafts)
        assert result["spec_decode_acceptance_length"] == pytest.approx(length)
        rates = [sum(d > i for d in drafts) / len(drafts) for i in range(4)]
        assert result["spec_decode_per_position_acceptance_rates"] == pytest.approx(rates)

    check()


def test_figures_of_outcomes():
    """TPOT leaves the first token out, and a figure of nothing is None."""
    done = [
        Outcome(ttft=1.0, latency=3.0, itl=(0.5, 1.5), prompt_len=7, output_tokens=5),
        Outcome(ttft=2.0, latency=2.0, output_tokens=1),
    ]
    found = latency_results([*done, Outcome(error="x")], 4.0)
    assert (found["mean_tpot_ms"], found["median_itl_ms"]) == (500, 1000)
    assert (found["mean_ttft_ms"], found["p90_e2el_ms"]) == (1500, pytest.approx(2900))
    assert (found["output_throughput"], found["request_throughput"]) == (1.5, 0.5)
    assert (found["failed"], found["total_token_throughput"]) == (1, 13 / 4)
    assert latency_results([Outcome(error="x")], 1.0)["p99_ttft_ms"] is None


def test_failures_are_counted_and_in_no_figure(fake):
    good = Script(((0.0, 2), (0.0, 2)))
    bad = [Script(((0.2, 1), (0.2, 9)), fault=fault) for fault in ("status", "error", "cut")]
    fake([good, *bad, good])
    result = measure(options(max_concurrency=1), work(5))
    assert (result["completed"], result["failed"], result["total_output_tokens"]) == (2, 3, 8)
    assert [bool(error) for error in result["errors"]] == [False, True, True, True, False]
    assert "no room" in result["errors"][1] and "it broke" in result["errors"][2]
    assert result["p99_e2el_ms"] < 200
    assert not any(name.startswith("spec_decode") for name in result)  # this server has no /metrics


def test_server_without_usage_is_refused(fake):
    fake([Script(((0.0, 3), (0.0, 4)))], usage=False)
    with pytest.raises(DraftsmithError, match="usage"):
        measure(options(), work(1))


def test_requests_repeat_by_seed_and_say_what_was_asked(fake):
    server = fake([Script(((0.0, 1),))])
    asked = options(ignore_eos=True, temperature=0.5, seed=7, extra_body='{"top_k": 2}')
    for _ in range(2):
        measure(asked, work(3))
    runs = [sorted(map(json.dumps, server.bodies[i : i + 3])) for i in (1, 5)]
    assert runs[0] == runs[1]
    assert sorted(body["seed"] for body in server.bodies[1:4]) == [7, 8, 9]
    expected = {"model": "fake", "ignore_eos": True, "temperature": 0.5, "top_k": 2}
    expected |= {"max_tokens": 8, "stream_options": {"include_usage": True}}
    assert all(expected.items() <= body.items() for body in server.bodies)


@given(st.integers(1, 400), st.floats(0.1, 1000), st.integers(0, 99))
def test_arrivals_have_their_rate(count, rate, seed):
    times = arrival_times(count, rate, seed)
    assert times == arrival_times(count, rate, seed)
    assert all(0 <= a <= b for a, b in itertools.pairwise(times))
    assert times[-1] == pytest.approx(count / rate)


def test_requests_are_sent_when_they_arrive_and_wait_for_a_slot(fake):
    fake([Script(((0.1, 1),))])
    assert measure(options(request_rate=8.0), work(6))["duration"] >= 0.75
    waiting = measure(options(max_concurrency=1), work(3))
    assert waiting["duration"] >= 0.3 and waiting["p99_e2el_ms"] < 1000 * (0.1 + LATE_S)


def test_drafting_is_what_came_between():
    text = """vllm:spec_decode_num_drafts_total{engine="0",model_name="a b"} 7.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="a b"} 3.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="a b"} 1.7953297338932453e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="a b"} 40.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="a b"} 20.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 10.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 9.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",position="0"} 1.0
"""
    before, after = read_counters(text), SpecDecodeCounters(14, 56, 26, [13, 12, 1])
    assert before == SpecDecodeCounters(10, 40, 20, [10, 10])
    assert read_counters("vllm:request_success_total 4\n") is None
    found = drafting_results(before, after)
    assert found["spec_decode_acceptance_length"] == 2.5
    assert found["spec_decode_acceptance_rate"] == 37.5
    assert found["spec_decode_per_position_acceptance_rates"] == [0.75, 0.5, 0.25]
    for pair in ((None, after), (before, None), (after, before), (after, after)):
        assert drafting_results(*pair) == {}


# ------------------------------------------------------------------------------ data sets


def test_random_prompts_have_their_length(byte_tokenizer):
    asked = BenchOptions(dataset_name="random", num_prompts=5, random_input_len=9, seed=3)
    found = load_questions(asked, byte_tokenizer)
    assert found == load_questions(asked, byte_tokenizer) and len({str(q) for q in found}) == 5
    assert {(len(question.prompt), question.output_len) for question in found} == {(9, 128)}
    assert not {*byte_tokenizer.all_special_ids}.intersection(*(q.prompt for q in found))


def test_files_are_texts_or_conversations_and_repeat(tmp_path):
    custom, turns = tmp_path / "custom.jsonl", tmp_path / "question.jsonl"
    answered = [{"role": "user", "content": "b"}, {"role": "assistant", "content": "c"}]
    rows = [{"prompt": "a"}, {"messages": answered}]
    custom.write_text("".join(json.dumps(row) + "\n" for row in rows))
    both = [{"category": c, "turns": [c, "more"]} for c in ("writing", "math")]
    turns.write_text("".join(json.dumps(row) + "\n" for row in both))

    def texts(name, path, seed):
        asked = BenchOptions(dataset_name=name, dataset_path=str(path), num_prompts=3, seed=seed)
        return tuple(question.prompt[-1]["content"] for question in load_questions(asked))

    assert {texts("custom", custom, seed) for seed in range(9)} == {tuple("aba"), tuple("bab")}
    assert texts("custom", custom, 3) == texts("custom", custom, 3)
    assert set(texts("mt_bench", turns, 0)) == {"writing", "math"}
    plain = {"dataset_name": "custom", "dataset_path": str(custom), "backend": "openai"}
    with pytest.raises(ConfigError) as error:
        load_questions(BenchOptions(**plain))
    assert error.value.where == f"{custom}:2"


@pytest.mark.parametrize("row", ['{"text": "a"}', "[1]", '{"messages": [5]}'])
def test_wrong_row_is_named(tmp_path, row):
    (tmp_path / "f.jsonl").write_text('{"prompt": "a"}\n' + row)
    with pytest.raises(DataError) as error:
        load_questions(BenchOptions(dataset_name="custom", dataset_path=str(tmp_path / "f.jsonl")))
    assert error.value.where == f"{tmp_path / 'f.jsonl'}:2"


# ----------------------------------------------------------------- which K to serve with


@st.composite
def measured(draw):
    lengths = draw(st.sets(st.integers(0, 6), min_size=1))
    levels = draw(st.sets(st.integers(1, 900), min_size=1, max_size=5))
    gain = st.sampled_from([0.5, 0.9, 1.0, 1.1, 2.0])
    return {level: {k: draw(gain) for k in lengths} for level in levels}


class Row:
    draft_limit = most_drafts = 1000


def drafts(advice, batch_size: int) -> int:
    """What our engine drafts for a batch of that size."""
    if advice is None:
        return 0
    config = parse_speculative_config({"method": "ngram"} | json.loads(json.dumps(advice)))
    schedule = config.num_speculative_tokens_per_batch_size
    policy = DraftLength(config.num_speculative_tokens, schedule)
    return policy.limits([Row()] * batch_size)[0]


@settings(max_examples=60, deadline=None)
@given(measured())
def test_every_concurrency_gets_its_fastest_length(gains):
    advice = advised_lengths(gains)
    for level, values in gains.items():
        known = {0: 1.0} | values
        fastest = min(k for k in known if known[k] == max(known.values()))
        assert best(values) == fastest == drafts(advice, level)
    ranges = (advice or {}).get(SCHEDULE, [])
    for before, after in zip([[0, 0, None], *ranges], ranges):
        assert after[0] == before[1] + 1 <= after[1] and after[2] != before[2]
    assert len(ranges) != 1


# ------------------------------------------------------------------------- our own server


@pytest.fixture(scope="module")
def model(tiny_model, byte_tokenizer):
    model = tiny_model("qwen3", vocab_size=len(byte_tokenizer), max_position_embeddings=256)
    model.generation_config.eos_token_id = None
    return model


RANDOM = ["--dataset-name", "random", "--num-prompts", "4", "--random-input-len", "12"]
RANDOM += ["--random-output-len", "20", "--temperature", "0"]


@pytest.mark.slow
def test_our_own_server_counts_the_same(serving, drafting_llm, model, byte_tokenizer, tmp_path):
    """Through the command: tokens and acceptance as the engine itself has them."""
    byte_tokenizer.save_pretrained(tmp_path / "tokenizer")
    llm = drafting_llm("ngram", model, max_num_seqs=3)
    flags = [*RANDOM, "--base-url", serving(llm), "--tokenizer", str(tmp_path / "tokenizer")]
    command = ["bench", *flags, "--save-result", "--result-dir", str(tmp_path)]
    printed = CliRunner().invoke(app, command)
    assert printed.exit_code == 0, printed.output
    result = json.loads((tmp_path / "bench.json").read_text())
    assert (result["completed"], result["failed"], result["total_output_tokens"]) == (4, 0, 80)
    assert result["total_input_tokens"] == 48
    assert 0 < result["spec_decode_num_drafts"] < llm.engine.counters.num_drafts
    assert "TTFT" in printed.output and "random tokens" in printed.output


@pytest.mark.slow
def test_off_and_every_length_side_by_side(serving, drafting_llm, model, tmp_path):
    """Greedy answers are the same; gains are quotients of the speeds."""
    on, off = (serving(drafting_llm(kind, model, max_num_seqs=4)) for kind in ("ngram", "off"))
    (tmp_path / "f.jsonl").write_text('{"prompt": "ab ab ab"}\n{"prompt": "cd cd"}\n')
    flags = f"--dataset-name custom --dataset-path {tmp_path / 'f.jsonl'} --num-prompts 4"
    flags += f" --output-len 16 --temperature 0 --repeats 2 --result-dir {tmp_path}"
    flags += f" --concurrencies 1,2 --baseline-url {off} --base-url "

    def run(rest: str):
        return CliRunner().invoke(app, ["bench", *shlex.split(flags + rest)])

    printed = run(f"{on} --draft-lengths 1,3")
    assert printed.exit_code == 0 and "advice: " in printed.output, printed.output
    result = json.loads((tmp_path / "comparison.json").read_text())
    assert [level["max_concurrency"] for level in result["levels"]] == [1, 2]
    for level in result["levels"]:
        plain = level["modes"].pop("off")
        assert [*level["modes"]] == ["K=1", "K=3"] and "spec_decode_num_drafts" not in plain
        for drafting in level["modes"].values():
            assert drafting["identical_outputs"] == 4 and drafting["spec_decode_num_drafts"] > 0
            assert len(drafting["spec_decode_per_position_acceptance_rates"]) == 3
            assert drafting["gain"] == drafting["output_throughput"] / plain["output_throughput"]
            assert drafting["gain_range"] == sorted(drafting["gain_range"])
    for wrong in (off, f"{on} {on}", f"{on} --draft-lengths 9"):
        refused = run(wrong)
        assert refused.exit_code == 2 and "--base-url" in refused.output


# ---------------------------------------------------------------------------------- flags


def read(line: str) -> BenchOptions:
    command = typer.main.get_command(app).commands["bench"]
    context = command.make_context("bench", shlex.split(line))
    return validated(BenchOptions, "bench", given_values(context.params))


def test_flags_are_those_of_vllm():
    chat = read(
        "--backend openai-chat --base_url http://a:1/v1 --model m --dataset-name mt_bench"
        " --dataset-path q.jsonl --num-prompts 7 --request-rate 2.5 --max_concurrency=4 --seed 3"
        " --ignore-eos --temperature 0 --output-len 9 --extra-body '{\"top_p\": 0.5}'"
    )
    assert (chat.url, chat.model, chat.chat) == ("http://a:1/v1", "m", True)
    assert (chat.request_rate, chat.max_concurrency, chat.num_prompts) == (2.5, 4, 7)
    assert chat.body == {"temperature": 0.0, "ignore_eos": True, "top_p": 0.5}
    random = read("--dataset-name random --port 9 --random-input-len 5")
    assert (random.url, random.chat, random.random_input_len) == ("http://127.0.0.1:9", False, 5)
    assert random.request_rate == math.inf and random.body == {"ignore_eos": True}
    compared = "--dataset-name random --base-url a b --baseline-url c --concurrencies 1,4"
    assert (read(compared).base_url, read(compared).concurrencies) == (("a", "b"), (1, 4))


@pytest.mark.parametrize(
    "line, named",
    [
        ("--dataset-name nothing", "nothing"),
        ("--dataset-name random --num-prompts 0", "--num-prompts"),
        ("--dataset-name random --repeats 3", "--baseline-url"),
        ("--dataset-name random --baseline-url http://a", "--base-url"),
        ("--dataset-name custom", "--dataset-path"),
        ("--dataset-name random --no-such-flag 1", "--no-such-flag"),
        ("--dataset-name random --port 1", "is the server running"),
    ],
)
def test_what_cannot_be_is_named_at_once(line, named):
    result = CliRunner().invoke(app, ["bench", *shlex.split(line)], env={"COLUMNS": "200"})
    assert result.exit_code == 2 and named in result.output.replace("\n", " ")
