"""The load generator against servers of known timing, and against the project's own."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import shlex
from dataclasses import dataclass, field

import httpx2
import openai
import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from draftsmith.inference.bench import compare_servers, load_generator
from draftsmith.inference.bench.advice import SCHEDULE, advised_lengths
from draftsmith.inference.bench.bench_options import BenchOptions
from draftsmith.inference.bench.compare_servers import Serving
from draftsmith.inference.bench.datasets import Question, load_questions
from draftsmith.inference.bench.load_generator import (
    Outcome,
    arrival_times,
    drafting_results,
    latency_results,
    measure,
)
from draftsmith.inference.entrypoints.speculative_config import parse_speculative_config
from draftsmith.inference.flags import passed_values, validated
from draftsmith.inference.metrics import SpecDecodeCounters
from draftsmith.inference.server_counters import read_counters
from draftsmith.inference.spec_decode.draft_length import DraftLength
from draftsmith.speculators.errors import ConfigError, DataError, DraftsmithError
from draftsmith.train.cli import app
from tests.support.errors import raises_at

MODELS = "http://127.0.0.1:8000/v1/models"  # of the options' default address
LATE_S = 0.8  # what a busy machine may add to a time


@dataclass
class FakeServer:
    """Streams one answer to every request: pieces of (seconds before it, tokens in it). `faults`:
    by number of the request (0 warms the server up), "status", "error", "cut", "html", or the data
    of an event that is no chunk. `models`: the answer of /v1/models."""

    pieces: list[tuple[float, int]]
    faults: dict[int, str] = field(default_factory=dict)
    usage: bool = True
    models: object = (("data", [{"id": "fake"}]),)
    bodies: list[dict] = field(default_factory=list)

    async def __call__(self, request: httpx2.Request) -> httpx2.Response:
        if request.url.path == "/v1/models":
            if isinstance(self.models, str):
                return httpx2.Response(200, html=self.models)
            return httpx2.Response(200, json=dict(self.models))
        if request.url.path == "/metrics":
            return httpx2.Response(404)
        fault = self.faults.get(len(self.bodies), "")
        self.bodies.append(json.loads(request.content))
        if fault == "status":
            return httpx2.Response(429, json={"error": {"message": "no room"}})
        if fault == "html":
            return httpx2.Response(200, html="<p>A page</p>")
        form = {"content-type": "text/event-stream"}
        return httpx2.Response(200, headers=form, content=self.stream(fault))

    async def stream(self, fault: str):
        chat = "messages" in self.bodies[-1]
        if chat:
            yield event(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}}])
        for number, (wait, tokens) in enumerate(self.pieces, 1):
            await asyncio.sleep(wait)
            if fault == "cut":
                raise httpx2.ReadError("gone")
            if fault == "error":
                yield event(error={"message": "it broke"})
            if fault.startswith(("{", "5", "[")):
                yield f"data: {fault}\n\n".encode()
            piece = {"delta": {"content": "x" * tokens}} if chat else {"text": "x" * tokens}
            reason = "length" if number == len(self.pieces) else None
            yield event(choices=[{"index": 0, "finish_reason": reason, **piece}])
        if self.usage:
            tokens = sum(tokens for _, tokens in self.pieces)
            yield event(choices=[], usage={"prompt_tokens": 3, "completion_tokens": tokens})
        yield b"data: [DONE]\n\n"


def event(**fields) -> bytes:
    return f"data: {json.dumps({'id': 'a', 'object': 'x', 'model': 'fake', **fields})}\n\n".encode()


@pytest.fixture
def fake(monkeypatch):
    """`fake(pieces, …)`: a FakeServer that every client of the load generator reaches."""

    def start(*arguments, **more) -> FakeServer:
        server = FakeServer(*arguments, **more)

        def client_at(url: str) -> openai.AsyncOpenAI:
            client = httpx2.AsyncClient(transport=httpx2.MockTransport(server))
            options = {"api_key": "none", "max_retries": 0, "http_client": client}
            return openai.AsyncOpenAI(base_url=f"{url}/v1", **options)

        monkeypatch.setattr(load_generator, "client_at", client_at)
        return server

    return start


def work(count: int, chat: bool = False) -> list[Question]:
    prompts = [[{"role": "user", "content": f"{i}"}] if chat else f"{i}" for i in range(count)]
    return [Question(prompt, 8) for prompt in prompts]


def options(**changes) -> BenchOptions:
    more = {"dataset_name": "custom", "dataset_path": "unread.jsonl", "backend": "openai"}
    return BenchOptions(**(more | changes))


# ------------------------------------------------------------ times and counts of streams


@pytest.mark.parametrize("chat", [False, True])
def test_results_are_those_of_the_streams(fake, chat):
    """Tokens are those of the usage, however many a piece holds; times are no shorter than the
    server took, without the wait for a slot."""
    fake([(0.05, 2), (0.02, 3), (0.0, 1)])
    backend = "openai-chat" if chat else "openai"
    result = measure(options(max_concurrency=1, backend=backend), work(3, chat))
    assert (result["completed"], result["failed"]) == (3, 0)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (9, 18)
    assert result["generated_texts"] == ["x" * 6] * 3 and result["duration"] >= 0.2
    for name, seconds in (("ttft", 0.05), ("e2el", 0.07)):
        assert seconds - 0.005 <= result[f"mean_{name}_ms"] / 1000 < seconds + LATE_S
    assert result["output_throughput"] * result["duration"] == pytest.approx(18)
    assert not any(name.startswith("spec_decode") for name in result)  # it has no /metrics


def test_results_of_outcomes():
    """TPOT leaves the first token out, and a result of nothing is None."""
    done = [
        Outcome(ttft=1.0, latency=3.0, itl=(0.5, 1.5), prompt_len=7, output_tokens=5),
        Outcome(ttft=2.0, latency=2.0, output_tokens=1),
    ]
    result = latency_results([*done, Outcome(error="x")], 4.0)
    assert (result["mean_tpot_ms"], result["median_itl_ms"]) == (500, 1000)
    assert (result["mean_ttft_ms"], result["p90_e2el_ms"]) == (1500, pytest.approx(2900))
    assert (result["output_throughput"], result["request_throughput"]) == (1.5, 0.5)
    assert (result["failed"], result["total_token_throughput"]) == (1, 13 / 4)
    assert latency_results([Outcome(error="x")], 1.0)["p99_ttft_ms"] is None


def test_failures_are_counted_and_in_no_result(fake):
    fake([(0.0, 2), (0.0, 2)], {2: "status", 3: "error", 4: "cut"})
    result = measure(options(max_concurrency=1), work(5))
    assert (result["completed"], result["failed"], result["total_output_tokens"]) == (2, 3, 8)
    assert [bool(error) for error in result["errors"]] == [False, True, True, True, False]
    assert "no room" in result["errors"][1] and "it broke" in result["errors"][2]
    fake([(0.0, 3)], usage=False)
    with pytest.raises(DraftsmithError, match="usage"):
        measure(options(), work(1))


@pytest.mark.parametrize(
    "fault", ["html", "{broken", "5", "[]", '{"choices": null}', '{"choices": [5]}']
)
def test_answer_that_is_none_fails_its_request_alone(fake, fault):
    fake([(0.0, 2)], {2: fault})
    result = measure(options(max_concurrency=1), work(3))
    assert [bool(error) for error in result["errors"]] == [False, True, False]


@pytest.mark.parametrize("prompt, temperature", [("a\ud800", 1.0), ("a", math.nan)])
def test_request_that_is_no_json_says_so(fake, prompt, temperature):
    fake([(0.0, 1)])
    with pytest.raises(DraftsmithError, match="request cannot be written as JSON"):
        measure(options(temperature=temperature), [Question(prompt, 8)])


@pytest.mark.parametrize("models", ["<p>A page</p>", (), (("data", [5]),), (("data", []),)])
def test_server_without_a_list_of_models_is_named(fake, models):
    fake([(0.0, 2)], models=models)
    with raises_at(ConfigError if models == (("data", []),) else DraftsmithError, MODELS):
        measure(options(), work(1))


def test_requests_repeat_by_seed_and_have_the_options(fake):
    server = fake([(0.0, 1)])
    for _ in range(2):
        measure(options(ignore_eos=True, temperature=0.5, seed=7, extra_body='{"a": 2}'), work(3))
    runs = [sorted(map(json.dumps, server.bodies[i : i + 3])) for i in (1, 5)]
    assert runs[0] == runs[1]
    assert sorted(body["seed"] for body in server.bodies[1:4]) == [7, 8, 9]
    expected = {"model": "fake", "ignore_eos": True, "temperature": 0.5, "a": 2}
    expected |= {"max_tokens": 8, "stream_options": {"include_usage": True}}
    assert all(expected.items() <= body.items() for body in server.bodies)


@given(st.integers(1, 400), st.floats(0.1, 1000), st.integers(0, 99))
def test_arrivals_have_their_rate(count, rate, seed):
    times = arrival_times(count, rate, seed)
    assert times == arrival_times(count, rate, seed)
    assert all(0 <= a <= b for a, b in itertools.pairwise(times))
    assert times[-1] == pytest.approx(count / rate)
    assert arrival_times(count, math.inf, seed) == [0.0] * count


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
    result = drafting_results(before, after)
    assert result["spec_decode_acceptance_length"] == 2.5
    assert result["spec_decode_acceptance_rate"] == 37.5
    assert result["spec_decode_per_position_acceptance_rates"] == [0.75, 0.5, 0.25]
    for pair in ((None, after), (after, before), (after, after)):
        assert drafting_results(*pair) == {}


# ------------------------------------------------------------------------------ data sets


def test_random_prompts_have_their_length(byte_tokenizer):
    options = BenchOptions(dataset_name="random", model="m", num_prompts=5, random_input_len=9)
    questions = load_questions(options, byte_tokenizer)
    assert questions == load_questions(options, byte_tokenizer)
    assert {(len(q.prompt), q.output_len) for q in questions} == {(9, 128)}
    assert not {*byte_tokenizer.all_special_ids}.intersection(*(q.prompt for q in questions))


def test_files_are_texts_or_conversations_and_repeat(tmp_path):
    custom, turns = tmp_path / "custom.jsonl", tmp_path / "question.jsonl"
    answered = [{"role": "user", "content": "b"}, {"role": "assistant", "content": "c"}]
    rows = [{"prompt": "a"}, {"messages": answered}]
    custom.write_text("".join(json.dumps(row) + "\n" for row in rows))
    turns.write_text('{"category": "writing", "turns": ["first", "more"]}')

    def texts(name, path, seed=0):
        options = BenchOptions(dataset_name=name, dataset_path=str(path), num_prompts=3, seed=seed)
        return "".join(question.prompt[-1]["content"] for question in load_questions(options))

    assert {texts("custom", custom, seed) for seed in range(9)} == {"aba", "bab"}
    assert texts("mt_bench", turns) == 3 * "first"
    plain = {"dataset_name": "custom", "dataset_path": str(custom), "backend": "openai"}
    with raises_at(ConfigError, f"{custom}:2"):
        load_questions(BenchOptions(**plain))


@pytest.mark.parametrize(
    "row", ['{"text": "a"}', "[1]", '{"messages": [5]}', '{"messages": [{"role": "user"}, "x"]}']
)
def test_wrong_row_is_named(tmp_path, row):
    (tmp_path / "f.jsonl").write_text('{"prompt": "a"}\n' + row)
    with raises_at(DataError, f"{tmp_path / 'f.jsonl'}:2"):
        load_questions(BenchOptions(dataset_name="custom", dataset_path=str(tmp_path / "f.jsonl")))


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
    return policy.plan([Row()] * batch_size).limits[0]


@settings(max_examples=60, deadline=None)
@given(measured())
def test_every_concurrency_gets_its_fastest_length(gains):
    advice = advised_lengths(gains)
    for level, values in gains.items():
        known = {0: 1.0} | values
        fastest = min(k for k in known if known[k] == max(known.values()))
        assert fastest == drafts(advice, level)
    ranges = (advice or {}).get(SCHEDULE, [])
    for before, after in zip([[0, 0, None], *ranges], ranges):
        assert after[0] == before[1] + 1 <= after[1] and after[2] != before[2]
    assert len(ranges) != 1


# ---------------------------------------------------------------- our own server, and flags


@pytest.mark.slow
def test_off_and_every_length_side_by_side(
    serving, drafting_llm, tiny_model, byte_tokenizer, tmp_path
):
    """Greedy answers are the same; gains are quotients of the speeds."""
    model = tiny_model("qwen3", vocab_size=len(byte_tokenizer), max_position_embeddings=256)
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
    for wrong in (off, f"{on} --base-url {on}", f"{on} --draft-lengths 9"):
        refused = run(wrong)
        assert refused.exit_code == 2 and "--base-url" in refused.output


def test_a_server_that_dies_takes_nothing_of_what_was_compared(monkeypatch):
    """Two repeats at two concurrencies, of which the last is not measured."""
    speeds = iter([10.0, 15.0, 20.0, 24.0, 10.0, 16.0])

    def measure(options, questions):
        speed = next(speeds, None)
        if speed is None:
            raise ConfigError("a first request failed", where="server")
        return {
            "model_id": "m",
            "failed": 0,
            "output_throughput": speed,
            "request_parameters": {},
            "max_concurrency": options.max_concurrency,
        }

    async def servings(options):
        return [Serving("off", None, {}), Serving("K=2", 2, {})]

    monkeypatch.setattr(compare_servers, "measure", measure)
    monkeypatch.setattr(compare_servers, "_servings", servings)
    values = {"dataset_name": "random", "concurrencies": (1, 4), "repeats": 2, "model": "m"}
    options = BenchOptions.model_validate(
        values | {"baseline_url": "http://b:1", "base_url": ("http://a:1",)}
    )
    kept = []
    with pytest.raises(ConfigError, match="first request"):
        compare_servers.compare(options, [], kept.append)
    assert [len(comparison["levels"]) for comparison in kept] == [1, 2, 2]
    modes = [level["modes"]["K=2"]["gain"] for level in kept[1]["levels"]]
    assert modes == [1.5, 1.2] and kept[-1]["repeats"] == 1


def test_repeat_whose_counters_were_lost_leaves_the_others_theirs():
    """As of a server that was restarted between two repeats."""
    drafted = {"output_throughput": 3.0, "spec_decode_acceptance_length": 2.0}
    drafted |= {"request_parameters": {}}
    lost = {"output_throughput": 5.0, "request_parameters": {}}
    row = compare_servers._row([drafted, lost], [{"output_throughput": 2.0}] * 2)
    assert (row["output_throughput"], row["spec_decode_acceptance_length"]) == (4.0, 2.0)
    assert row["gain_range"] == [1.5, 2.5]


def test_flags_are_those_of_vllm():
    def read(line: str) -> BenchOptions:
        command = typer.main.get_command(app).commands["bench"]
        context = command.make_context("bench", shlex.split(line))
        return validated(BenchOptions, "bench", passed_values(context.params))

    chat = read(
        "--backend openai-chat --base_url http://a:1/v1 --model m --dataset-name mt_bench"
        " --dataset-path q.jsonl --max_concurrency=4 --ignore-eos --temperature 0"
        " --extra-body '{\"top_p\": 0.5}'"
    )
    assert (chat.url, chat.model, chat.chat) == ("http://a:1/v1", "m", True)
    assert chat.body == {"temperature": 0.0, "ignore_eos": True, "top_p": 0.5}
    random = read("--dataset-name random --model m --port 9 --random-input-len 5")
    assert (random.url, random.chat, random.random_input_len) == ("http://127.0.0.1:9", False, 5)
    assert read("--dataset-name random --model m --host ::1").url == "http://[::1]:8000"
    compared = read(
        "--dataset-name gsm8k --dataset-path f --base-url a --base-url b --baseline-url c"
        " --concurrencies 1,4"
    )
    assert (compared.base_url, compared.concurrencies) == (("a", "b"), (1, 4))


@pytest.mark.parametrize(
    "line, named",
    [
        ("", "--dataset-name: must be given"),
        ("--dataset-name nothing", "expected one of random, custom, spec_bench"),
        ("--dataset-name random --num-prompts 0", "--num-prompts"),
        ("--dataset-name random", "--tokenizer"),
        ("--dataset-name random --model m --backend openai-chat", "--backend"),
        ("--dataset-name gsm8k --dataset-path f --save-result --result-dir FILE", "--result-dir"),
        ("--dataset-name gsm8k --dataset-path f --repeats 3", "--baseline-url"),
        ("--dataset-name custom", "--dataset-path"),
        ("--dataset-name custom --dataset-path nowhere", "nowhere: could not be read"),
        ("--dataset-name custom --dataset-path FILE --seed -1", "--seed"),
        ("--dataset-name custom --dataset-path FILE --port 99999", "--port"),
        ("--dataset-name custom --dataset-path FILE --base-url http://a:80o0", "'http://a:80o0'"),
        ("--dataset-name custom --dataset-path FILE --base-url http://a:99999", "no address"),
        ("--dataset-name custom --dataset-path FILE --base-url localhost:8000", "http://"),
        ("--dataset-name custom --dataset-path FILE --port 1", "is the server running"),
    ],
)
def test_what_cannot_be_is_named_at_once(line, named, tmp_path):
    (tmp_path / "f.jsonl").write_text('{"prompt": "a"}')
    line = line.replace("FILE", str(tmp_path / "f.jsonl"))
    result = CliRunner().invoke(app, ["bench", *shlex.split(line)], env={"COLUMNS": "200"})
    assert result.exit_code == 2 and named in result.output.replace("\n", " ")
