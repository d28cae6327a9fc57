"""The load generator against a server of known timing, and against the project's own."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference.bench.compare import MODES, compare
from inference.bench.datasets import Question, load_questions
from inference.bench.figures import Outcome, drafting_figures, figures
from inference.bench.options import BenchOptions
from inference.bench.run import Work, arrival_times, measure, prepare
from inference.evaluation.suites import SUITES
from inference.metrics import SpecDecodeCounters
from speculators.errors import DataError

LATE_S = 0.8  # what a busy machine may add to a time


@dataclass(frozen=True)
class Script:
    """How the server answers: pieces of (seconds before it, tokens in it); a fault: "status",
    "error", "cut"."""

    pieces: tuple[tuple[float, int], ...]
    prompt_len: int = 3
    fault: str = ""


@dataclass
class FakeServer:
    """An HTTP server on loopback that streams what the scripts say, in the order in which requests
    come; it keeps the bodies. Drafting: every piece of n tokens was a proposal of `k` drafts of
    which n-1 were accepted."""

    scripts: list[Script]
    usage: bool = True
    k: int = 0
    bodies: list[dict] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)
    busiest: int = 0
    _busy: int = 0

    async def handle(self, reader, writer):
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                lengths = [
                    x.split(":")[1]
                    for x in head.split("\r\n")
                    if x.lower().startswith("content-length")
                ]
                body = await reader.readexactly(int(lengths[0]) if lengths else 0)
                await self.answer(head.split()[1], body, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def answer(self, path, body, writer):
        if path == "/v1/models":
            return self.whole(
                writer, json.dumps({"data": [{"id": "fake", "root": "somewhere/fake"}]})
            )
        if path == "/metrics":
            return self.whole(
                writer, self.metrics() if self.k else "", "200 OK" if self.k else "404 Not Found"
            )
        asked = json.loads(body)
        script = self.scripts[len(self.bodies) % len(self.scripts)]
        self.bodies.append(asked)
        if script.fault == "status":
            return self.whole(writer, '{"error": {"message": "no room"}}', "429 Too Many Requests")
        self._busy += 1
        self.busiest = max(self.busiest, self._busy)
        try:
            await self.stream(script, "messages" in asked, writer)
        finally:
            self._busy -= 1

    async def stream(self, script, chat, writer):
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding:"
            b" chunked\r\n\r\n"
        )
        if chat:
            await self.event(writer, {"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        for i, (wait, tokens) in enumerate(script.pieces):
            await asyncio.sleep(wait)
            if script.fault == "cut" and i == len(script.pieces) - 1:
                writer.close()
                return
            if script.fault == "error" and i == len(script.pieces) - 1:
                await self.event(writer, {"error": {"message": "it broke"}})
                break
            self.drafts.append(tokens - 1)
            text, end = "x" * tokens, "length" if i == len(script.pieces) - 1 else None
            said = {"delta": {"content": text}} if chat else {"text": text}
            await self.event(writer, {"choices": [{"index": 0, "finish_reason": end, **said}]})
        if self.usage:
            count = {
                "prompt_tokens": script.prompt_len,
                "completion_tokens": sum(n for _, n in script.pieces),
            }
            await self.event(writer, {"choices": [], "usage": count})
        await self.event(writer, "[DONE]")
        writer.write(b"0\r\n\r\n")

    async def event(self, writer, data):
        text = f"data: {data if isinstance(data, str) else json.dumps(data)}\n\n".encode()
        writer.write(f"{len(text):x}\r\n".encode() + text + b"\r\n")
        await writer.drain()

    def whole(self, writer, text, status="200 OK"):
        writer.write(
            f"HTTP/1.1 {status}\r\nContent-Length: {len(text.encode())}\r\n\r\n{text}".encode()
        )

    def metrics(self):
        name, labels = "vllm:spec_decode_num_", 'model_name="fake",engine="0"'
        totals = {"drafts": len(self.drafts), "draft_tokens": self.k * len(self.drafts)}
        totals["accepted_tokens"] = sum(self.drafts)
        lines = [f"{name}{key}_total{{{labels}}} {value}.0" for key, value in totals.items()]
        for i in range(self.k):
            count = sum(each > i for each in self.drafts)
            lines.append(
                f'{name}accepted_tokens_per_pos_total{{{labels},position="{i}"}} {count}.0'
            )
        return "\n".join(lines) + "\n"


@contextmanager
def running(fake: FakeServer):
    """The base URL of that server, in a thread with a loop of its own."""
    loop = asyncio.new_event_loop()
    ready = threading.Event()
    thread = threading.Thread(
        target=lambda: (loop.call_soon(ready.set), loop.run_forever()), daemon=True
    )
    thread.start()
    ready.wait()
    server = asyncio.run_coroutine_threadsafe(
        asyncio.start_server(fake.handle, "127.0.0.1", 0), loop
    ).result()
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:

        async def end():
            server.close()
            handlers = asyncio.all_tasks() - {asyncio.current_task()}
            for each in handlers:
                each.cancel()
            await asyncio.gather(*handlers, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(end(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def work(count: int, chat: bool = False, tokens=None) -> Work:
    said = [
        {"messages": ({"role": "user", "content": f"{i}"},)} if chat else {"prompt": f"{i}"}
        for i in range(count)
    ]
    return Work([Question(8, **each) for each in said], "fake", None, tokens)


def options(url: str, **given) -> BenchOptions:
    if given.get("dataset_name") != "random":
        given |= {"dataset_name": "custom", "dataset_path": "unread.jsonl"}
    return BenchOptions(base_url=url, disable_tqdm=True, **given)


# -------------------------------------------------------------------- times and counts of streams

pieces = st.lists(
    st.tuples(st.sampled_from([0.0, 0.02, 0.05]), st.integers(1, 5)), min_size=1, max_size=5
)
scripts = st.lists(pieces.map(lambda p: Script(tuple(p))), min_size=1, max_size=4)


@settings(max_examples=15, deadline=None)
@given(scripts, st.booleans(), st.sampled_from([None, 1, 2]))
@pytest.mark.slow
def test_figures_are_those_of_the_streams(scripts, chat, concurrency):
    """Tokens are those of the usage, however many a piece holds; times are never shorter than the
    server took."""
    backend = {"backend": "openai-chat"} if chat else {}
    fake = FakeServer(scripts, k=4)
    with running(fake) as url:
        result = measure(
            options(url, max_concurrency=concurrency, **backend), work(len(scripts), chat)
        )
    order = [int(b["messages"][0]["content"] if chat else b["prompt"]) for b in fake.bodies]
    of = {request: scripts[i] for i, request in enumerate(order)}
    assert (result["completed"], result["failed"]) == (len(scripts), 0)
    tpots = []
    for i, script in of.items():
        waits, tokens = [w for w, _ in script.pieces], sum(n for _, n in script.pieces)
        assert (result["output_lens"][i], result["input_lens"][i]) == (tokens, 3)
        assert result["generated_texts"][i] == "x" * tokens
        assert waits[0] - 0.005 <= result["ttfts"][i] < waits[0] + LATE_S
        assert sum(waits) - 0.005 <= result["latencies"][i] < sum(waits) + LATE_S
        assert len(result["itls"][i]) == len(waits) - 1
        assert result["ttfts"][i] + sum(result["itls"][i]) == pytest.approx(result["latencies"][i])
        if tokens > 1:
            tpots.append(1000 * (result["latencies"][i] - result["ttfts"][i]) / (tokens - 1))
    assert result["mean_tpot_ms"] == (pytest.approx(np.mean(tpots)) if tpots else None)
    assert result["p90_e2el_ms"] == pytest.approx(1000 * np.percentile(result["latencies"], 90))
    assert (
        result["median_ttft_ms"]
        == result["p50_ttft_ms"]
        == pytest.approx(1000 * np.median(result["ttfts"]))
    )
    written = sum(result["output_lens"])
    assert result["output_throughput"] * result["duration"] == pytest.approx(written)
    assert result["total_token_throughput"] * result["duration"] == pytest.approx(
        written + 3 * len(scripts)
    )
    assert result["max_concurrent_requests"] <= (concurrency or len(scripts))
    assert fake.busiest <= (concurrency or len(scripts))
    assert (
        max(result["latencies"]) <= result["duration"]
        and result["max_output_tokens_per_s"] <= written + 1e-6
    )
    assert result["spec_decode_num_drafts"] == len(fake.drafts)
    assert result["spec_decode_acceptance_length"] == pytest.approx(
        1 + sum(fake.drafts) / len(fake.drafts)
    )
    rates = [sum(d > i for d in fake.drafts) / len(fake.drafts) for i in range(4)]
    assert result["spec_decode_per_position_acceptance_rates"] == pytest.approx(rates)


@pytest.mark.slow
def test_failures_are_counted_and_in_no_figure():
    good = Script(((0.0, 2), (0.0, 2)))
    bad = [Script(((0.3, 1), (0.3, 9)), fault=fault) for fault in ("status", "error", "cut")]
    with running(FakeServer([good, *bad, good])) as url:
        result = measure(options(url, max_concurrency=1), work(5))
    assert (result["completed"], result["failed"]) == (2, 3)
    assert result["output_lens"] == [4, 0, 0, 0, 4] and result["total_output_tokens"] == 8
    assert [bool(error) for error in result["errors"]] == [False, True, True, True, False]
    assert "no room" in result["errors"][1] and "it broke" in result["errors"][2]
    good = [1000 * result["latencies"][i] for i in (0, 4)]
    assert result["mean_e2el_ms"] == pytest.approx(np.mean(good))
    assert result["p99_e2el_ms"] == pytest.approx(np.percentile(good, 99))
    assert result["request_throughput"] * result["duration"] == pytest.approx(2)
    assert not any(name.startswith("spec_decode") for name in result)  # this server has no /metrics


def test_nothing_measured_is_no_figure():
    with running(FakeServer([Script((), fault="status")])) as url:
        result = measure(options(url), work(2))
    assert (
        result["completed"] == 0
        and result["mean_ttft_ms"] is None
        and result["p99_e2el_ms"] is None
    )


def test_a_server_without_usage():
    """Its tokens are counted from the text, or its answers are failures: never guessed from the
    pieces."""
    fake = FakeServer([Script(((0.0, 3), (0.0, 4)))], usage=False)
    with running(fake) as url:
        assert measure(options(url), work(1))["failed"] == 1
        assert measure(options(url), work(1, tokens=len))["output_lens"] == [7]


def test_a_silent_server_is_given_up():
    with running(FakeServer([Script(((5.0, 1),))])) as url:
        result = measure(options(url, request_timeout=0.2), work(1))
    assert result["failed"] == 1 and "Timeout" in result["errors"][0]


def test_requests_repeat_by_seed_and_say_what_was_asked():
    fake = FakeServer([Script(((0.0, 1),))])
    with running(fake) as url:
        asked = options(url, ignore_eos=True, temperature=0.5, seed=7)
        for _ in range(2):
            measure(asked, work(3))
    by_prompt = [sorted(map(json.dumps, fake.bodies[:3])), sorted(map(json.dumps, fake.bodies[3:]))]
    assert by_prompt[0] == by_prompt[1]
    assert sorted(body["seed"] for body in fake.bodies[:3]) == [7, 8, 9]
    for body in fake.bodies:
        assert body["model"] == "fake" and body["ignore_eos"] is True and body["temperature"] == 0.5
        assert body["max_tokens"] == 8 and body["stream_options"] == {"include_usage": True}


# ------------------------------------------------------------------------------
# arrivals


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 400),
    st.floats(0.1, 1000),
    st.integers(0, 99),
)
def test_arrivals_have_their_rate(count, rate, seed):
    times = arrival_times(count, rate, seed)
    assert times == arrival_times(count, rate, seed)
    assert all(0 <= a <= b for a, b in itertools.pairwise(times)) and times[-1] == pytest.approx(
        count / rate
    )
    assert arrival_times(count, math.inf, seed) == [0.0] * count


@pytest.mark.slow
def test_requests_are_sent_when_they_arrive():
    with running(FakeServer([Script(((0.0, 1),))])) as url:
        result = measure(options(url, request_rate=8.0), work(12))
    late = np.array(result["start_times"]) - arrival_times(12, 8.0, 0)  # by the same unknown start
    assert late.max() - np.median(late) < LATE_S and np.median(late) - late.min() < LATE_S
    assert result["duration"] >= 1.5


def test_waiting_for_a_turn_is_in_no_latency():
    with running(FakeServer([Script(((0.1, 1),))])) as url:
        result = measure(
            options(url, max_concurrency=1, percentile_metrics=("client_queue_time",)), work(3)
        )
    assert result["queue_times"][2] >= 0.195 and max(result["latencies"]) < 0.1 + LATE_S
    assert result["mean_client_queue_time_ms"] == pytest.approx(
        1000 * np.mean(result["queue_times"])
    )


# ------------------------------------------------------------------------------
# figures


def test_drafting_is_what_came_between():
    before, after = (
        SpecDecodeCounters(10, 40, 20, [10, 10]),
        SpecDecodeCounters(14, 56, 26, [13, 12, 1]),
    )
    found = drafting_figures(before, after)
    assert (
        found["spec_decode_acceptance_length"] == 2.5
        and found["spec_decode_acceptance_rate"] == 37.5
    )
    assert found["spec_decode_per_position_acceptance_rates"] == [0.75, 0.5, 0.25]
    for pair in ((None, after), (before, None), (after, before), (after, after)):
        assert drafting_figures(*pair) == {}


def test_one_token_has_no_time_per_token():
    found = figures(
        [Outcome(True, ttft=1.0, latency=1.0, output_tokens=1)], 2.0, ("tpot", "ttft"), (50,)
    )
    assert (
        found["mean_tpot_ms"] is None
        and found["mean_ttft_ms"] == 1000
        and "mean_itl_ms" not in found
    )


# ------------------------------------------------------------------------------
# datasets


@given(st.integers(2, 40), st.integers(0, 3))
@settings(max_examples=10, deadline=None)
def test_random_prompts_have_their_length(byte_tokenizer, length, seed):
    asked = BenchOptions(
        dataset_name="random",
        num_prompts=5,
        random_input_len=length,
        output_len=9,
        seed=seed,
        random_prefix_len=4,
    )
    found = load_questions(asked, byte_tokenizer)
    assert found == load_questions(asked, byte_tokenizer)
    assert len({each.prompt for each in found}) == 5 and all(each.output_len == 9 for each in found)
    assert {len(byte_tokenizer(each.prompt).input_ids) for each in found} == {4 + length}
    assert len({each.prompt[:4] for each in found}) == 1


def test_files_of_every_format(tmp_path):
    custom, turns = tmp_path / "custom.jsonl", tmp_path / "question.jsonl"
    rows = [
        {"prompt": "a", "output_tokens": 5},
        {"messages": [{"role": "user", "content": "b"}], "output_tokens": 6},
    ]
    custom.write_text("".join(json.dumps(row) + "\n" for row in rows))
    both = [
        {"question_id": i, "category": c, "turns": [c, "more"]}
        for i, c in enumerate(["writing", "math", "math"])
    ]
    turns.write_text("".join(json.dumps(row) + "\n" for row in both))

    def load(name, path, count=3, **given):
        asked = BenchOptions(dataset_name=name, dataset_path=str(path), num_prompts=count, **given)
        found = load_questions(asked, None)
        return [(each.messages[-1]["content"], each.output_len) for each in found]

    assert load("custom", custom, custom_output_len=-1, disable_shuffle=True) == [
        ("a", 5),
        ("b", 6),
        ("a", 5),
    ]
    assert load("custom", custom, disable_shuffle=True, no_oversample=True) == [
        ("a", 256),
        ("b", 256),
    ]
    for name in ("spec_bench", "mt_bench"):
        assert sorted(load(name, turns, output_len=7)) == [("math", 7), ("math", 7), ("writing", 7)]
        assert load(name, turns, 2, spec_bench_category="math") == [("math", 256)] * 2
    orders = {tuple(load("custom", custom, 2, seed=seed)) for seed in range(9)}
    assert len(orders) == 2 and load("custom", custom, seed=3) == load("custom", custom, seed=3)


@pytest.mark.parametrize(
    "name, text, output_len, named",
    [
        ("custom", '{"prompt": "a"}\n{"text": "b"}', None, "f.jsonl:2: expected prompt"),
        ("custom", '{"prompt": "a"}', -1, "f.jsonl:1: expected output_tokens"),
        ("custom", "[1]", None, "f.jsonl:1: 'list' object"),
        ("mt_bench", "{", None, "f.jsonl:1: Expecting property name"),
        ("spec_bench", '{"question": "a"}', None, "f.jsonl:1: expected turns"),
        ("gsm8k", '{"text": "a"}', None, "f.jsonl:1: expected question"),
        ("mt_bench", "", None, "there are no rows"),
    ],
)
def test_wrong_rows_are_named(tmp_path, name, text, output_len, named):
    path = tmp_path / "f.jsonl"
    path.write_text(text)
    asked = BenchOptions(
        dataset_name=name, dataset_path=str(path), custom_output_len=output_len or 9
    )
    with pytest.raises(DataError, match=named):
        load_questions(asked, None)


def test_every_suite_is_a_dataset():
    names = get_args(BenchOptions.model_fields["dataset_name"].annotation)
    assert names == ("random", "custom", *SUITES)


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_later_turns_hold_the_live_answers(tmp_path, tokenizer_folder, backend):
    """Each in turn, after the answer before it; a turn that fails takes those after it along."""
    path = tmp_path / "question.jsonl"
    path.write_text(json.dumps({"category": "qa", "turns": ["a", "b", "c"]}) + "\n")
    fake = FakeServer([Script(((0.0, 2),)), Script(((0.0, 3),))], k=4)
    with running(fake) as url:
        asked = BenchOptions(
            base_url=url,
            disable_tqdm=True,
            dataset_name="mt_bench",
            dataset_path=str(path),
            num_prompts=1,
            backend=backend,
            tokenizer=tokenizer_folder,
            seed=5,
        )
        result = measure(asked, prepare(asked))
        first = asked.model_copy(update={"first_turns_only": True})
        alone = measure(first, prepare(first))
        fake.scripts = [Script(((0.0, 2),), fault="status")]
        failed = measure(asked, prepare(asked))
    assert (result["completed"], result["num_prompts"], result["total_output_tokens"]) == (
        3,
        1,
        2 + 3 + 2,
    )
    assert [body["seed"] for body in fake.bodies[:3]] == [5, 6, 7]
    last = fake.bodies[2]
    if backend == "openai-chat":
        assert [turn["content"] for turn in last["messages"]] == ["a", "xx", "b", "xxx", "c"]
    else:
        assert (
            "user:a</s><s>assistant:xx</s><s>user:b</s><s>assistant:xxx</s><s>user:c</s>"
            in last["prompt"]
        )
    assert result["spec_decode_acceptance_length"] == pytest.approx(1 + (1 + 2 + 1) / 3)
    assert list(result["dataset_sha256"]) == ["question.jsonl"]
    assert alone["completed"] == 1 and (failed["completed"], failed["failed"]) == (0, 3)
    assert failed["errors"][1] == failed["errors"][2] == "not asked: the turn before it failed"


# ------------------------------------------------------------------------------ our own, and both


@pytest.fixture(scope="module")
def model(tiny_model, byte_tokenizer):
    model = tiny_model("qwen3", vocab_size=len(byte_tokenizer), max_position_embeddings=256)
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture
def tokenizer_folder(tmp_path, byte_tokenizer):
    byte_tokenizer.save_pretrained(tmp_path / "tokenizer")
    return str(tmp_path / "tokenizer")


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_our_own_server_counts_the_same(serving, drafting_llm, model, tokenizer_folder, backend):
    """Tokens, texts and acceptance as the engine itself has them."""
    llm = drafting_llm("ngram", model, max_num_seqs=3)
    url = serving(llm)
    asked = options(
        url,
        dataset_name="random",
        num_prompts=6,
        random_input_len=12,
        output_len=20,
        seed=3,
        backend=backend,
        tokenizer=tokenizer_folder,
        max_concurrency=3,
        num_warmups=1,
        temperature=0,
    )
    counters = llm.engine.counters
    result = measure(asked, prepare(asked))
    again = measure(asked, prepare(asked))
    assert (result["completed"], result["failed"], result["total_output_tokens"]) == (6, 0, 120)
    assert (
        result["generated_texts"] == again["generated_texts"]
        and result["input_lens"] == again["input_lens"]
    )
    assert (set(result["input_lens"]) == {12}) == (
        backend == "openai"
    )  # a chat has its template's tokens as well
    assert result["note"].startswith("random: load only")
    assert 0 < result["spec_decode_num_drafts"] < counters.num_drafts
    assert result["spec_decode_acceptance_length"] == again["spec_decode_acceptance_length"]


@pytest.mark.slow
def test_off_and_on_side_by_side(serving, drafting_llm, model, tokenizer_folder):
    """Greedy answers are the same; ratios are those of the results."""
    from contextlib import nullcontext

    urls = {
        mode: serving(drafting_llm("ngram" if mode == "on" else "off", model, max_num_seqs=4))
        for mode in MODES
    }
    asked = options(
        urls["on"],
        dataset_name="random",
        num_prompts=4,
        random_input_len=8,
        output_len=16,
        temperature=0,
        tokenizer=tokenizer_folder,
        compare=True,
        baseline_url=urls["off"],
        concurrencies=(1, 2),
    )
    servers = {mode: lambda url=url: nullcontext(url) for mode, url in urls.items()}
    found = compare(asked, prepare(asked), servers, together=True)
    assert [level["max_concurrency"] for level in found["levels"]] == [1, 2]
    for level in found["levels"]:
        off, on = level["off"], level["on"]
        assert (level["identical_outputs"], level["compared_outputs"]) == (4, 4)
        assert "spec_decode_num_drafts" in on and "spec_decode_num_drafts" not in off
        assert level["ratios"]["output_throughput"] == pytest.approx(
            on["output_throughput"] / off["output_throughput"]
        )
        assert on["tokens_per_second_per_user"] == pytest.approx(1000 / on["median_tpot_ms"])
        assert "generated_texts" not in on
