"""Many clients at a time: nobody's answer depends on the others or on who hangs up; a step that
fails ends its requests, and the next one is served."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest
import torch

from draftsmith.inference import SamplingParams
from draftsmith.inference.server.api_errors import SHUTTING_DOWN
from draftsmith.inference.server.app import make_app
from draftsmith.inference.server.engine_thread import MOST_FAILED_STEPS
from draftsmith.inference.server.serve_command import bind, serve_app
from draftsmith.inference.server.serve_options import ServeFlags, ServerOptions

CLIENT = httpx2.Client(timeout=60, limits=httpx2.Limits(max_connections=None))
LONG = {"prompt": "a long answer", "max_tokens": 230, "temperature": 0, "stream": True}
KINDS = (
    {"temperature": 0},
    {"temperature": 1.0, "top_p": 0.9, "repetition_penalty": 1.2},
    {"temperature": 0.7, "top_k": 20, "min_p": 0.01, "frequency_penalty": 0.3},
)
# requests of all kinds: a third greedy, the others with seeds of their own
MIXED = [
    {"prompt": f"{'request ' * (i % 5)}{i}", "max_tokens": 8 + i % 29, "seed": i, **KINDS[i % 3]}
    for i in range(32)
]


def offline_texts(llm, requests) -> list[str]:
    params = [
        SamplingParams(**{name: value for name, value in request.items() if name != "prompt"})
        for request in requests
    ]
    outputs = llm.generate([request["prompt"] for request in requests], params, False)
    return [output.outputs[0].text for output in outputs]


def ask(url: str, request: dict) -> str:
    """The text of a completion, from whole answers and streams in turn."""
    if request.get("seed", 0) % 2:
        answer = CLIENT.post(f"{url}/v1/completions", json=request)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["text"]
    with CLIENT.stream("POST", f"{url}/v1/completions", json=request | {"stream": True}) as answer:
        return "".join(data["choices"][0]["text"] for data in events(answer))


def events(answer):
    """The events of a stream, which must end as one."""
    assert answer.status_code == 200
    *lines, last = [line for line in answer.iter_lines() if line]
    assert last == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def hang_up(url: str, request: dict) -> None:
    """Reads a little of a stream, and goes."""
    with CLIENT.stream("POST", f"{url}/v1/completions", json=request) as answer:
        next(answer.iter_lines())


def wait_until(holds, seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it never became so"
        time.sleep(0.01)


def idle(serving, url) -> bool:
    server = serving.server(url)
    busy = server.llm.engine.has_unfinished or server.engine._active
    return not busy and server.engine.in_flight == 0


def metric(url: str, name: str) -> float:
    return float(re.search(rf"vllm:{name} (\S+)", CLIENT.get(f"{url}/metrics").text)[1])


@pytest.mark.slow
def test_32_at_a_time(serving, drafting_llm, model):
    """Greedy answers are those of the target alone, and seeds mean what they mean offline; ten hang
    up meanwhile."""
    url = serving(drafting_llm("fake", model, max_num_seqs=6), max_num_queued_reqs=64)
    with ThreadPoolExecutor(42) as pool:
        left = [pool.submit(hang_up, url, LONG | {"prompt": f"leaving {i}"}) for i in range(10)]
        texts = list(pool.map(lambda request: ask(url, request), MIXED))
        assert all(future.result() is None for future in left)
    assert texts[::3] == offline_texts(drafting_llm("off", model), MIXED[::3])
    assert texts == offline_texts(drafting_llm("fake", model, max_num_seqs=6), MIXED)
    wait_until(lambda: idle(serving, url))
    finished = metric(url, 'request_success_total{engine="0",finished_reason="length".*}')
    assert 32 <= finished < 42  # an answer may end before its reader has gone


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_hangs_up_gives_its_row_back(serving, drafting_llm, model, stream):
    """Before the next round: the engine's thread is held up while the client goes, and let go for
    one round."""
    url = serving(drafting_llm("off", model, max_num_seqs=1))
    server = serving.server(url)
    engine, go_on, rounds = server.llm.engine, threading.Event(), []
    step = engine.step
    engine.step = lambda: (rounds.append(1), step(), len(rounds) < 5 or go_on.wait(10))[1]
    body = json.dumps(LONG | {"stream": stream}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as client:
        client.sendall(head.encode() + body)
        wait_until(lambda: len(rounds) == 5)
        (request,) = engine.scheduler.running
    wait_until(lambda: server.engine.in_flight == 0)
    go_on.set()
    wait_until(lambda: idle(serving, url))
    assert request.finish_reason == "abort" and len(rounds) <= 6


@pytest.mark.parametrize("stream", [False, True])
def test_engine_thread_neither_tokenizes_nor_decodes_logprobs(
    serving, drafting_llm, model, byte_tokenizer, monkeypatch, stream
):
    """Workers do, each text once, whatever n is."""
    kind = type(byte_tokenizer)
    tokenize, decode, texts, threads = kind.__call__, kind.decode, [], set()

    def recorded_call(tokenizer, text, **options):
        texts.append(text)
        threads.add(threading.current_thread().name)
        return tokenize(tokenizer, text, **options)

    def recorded_decode(tokenizer, token_ids, **options):
        if not options:  # with options it writes the response
            threads.add(threading.current_thread().name)
        return decode(tokenizer, token_ids, **options)

    monkeypatch.setattr(kind, "__call__", recorded_call)
    monkeypatch.setattr(kind, "decode", recorded_decode)
    request = {"prompt": "abc", "bad_words": ["x", "yz"], "n": 2, "logprobs": 2, "max_tokens": 3}
    url = serving(drafting_llm("off", model))
    answer = CLIENT.post(f"{url}/v1/completions", json=request | {"stream": stream})
    assert answer.status_code == 200 and "top_logprobs" in answer.text
    assert texts == ["abc", "x", " x", "yz", " yz"]
    assert threads and not any(name.startswith("engine") for name in threads)


def test_a_full_queue_refuses(serving, drafting_llm, model):
    url = serving(drafting_llm("off", model, max_num_seqs=1), max_num_queued_reqs=1)
    server, request = serving.server(url), LONG | {"max_tokens": 60}
    with ThreadPoolExecutor(2) as pool:
        answers = [
            pool.submit(CLIENT.post, f"{url}/v1/completions", json=request) for _ in range(2)
        ]
        wait_until(lambda: server.engine.in_flight == 2)
        refused = CLIENT.post(f"{url}/v1/completions", json=request)
        error = refused.json()["error"]
        assert (error["type"], error["code"]) == ("requests", "rate_limit_exceeded")
        assert "--max-num-queued-reqs" in error["message"]
        assert refused.status_code == 429
        assert int(refused.headers["Retry-After"]) >= 1
        assert metric(url, "num_requests_waiting{.*}") == 1
        assert [answer.result().status_code for answer in answers] == [200, 200]
    assert CLIENT.post(f"{url}/v1/completions", json=request).status_code == 200


@pytest.mark.slow
@pytest.mark.parametrize("method, stream", [("propose", True), ("logits", False)])
def test_a_step_that_fails_ends_its_requests_and_the_next_is_served(
    serving, drafting_llm, model, caplog, method, stream, monkeypatch
):
    """Each with a 500 and the reason, which the log has too; who waits is served."""
    llm = drafting_llm("ngram", model, max_num_seqs=2)
    url = serving(llm)
    owner = llm.engine.proposer if method == "propose" else llm.engine.runner
    works, calls = getattr(owner, method), []

    def fails_once(*arguments):
        calls.append(arguments)
        if len(calls) == 8:
            raise RuntimeError("CUDA out of memory: 3 GiB")
        return works(*arguments)

    monkeypatch.setattr(owner, method, fails_once)
    request = LONG | {"stream": stream, "max_tokens": 100}
    post = lambda _: CLIENT.post(f"{url}/v1/completions", json=request)
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(post, range(4)))
    failed = [answer for answer in answers if "RuntimeError" in answer.text]
    assert 1 <= len(failed) <= 2
    for answer in failed:
        error = events(answer)[-1]["error"] if stream else answer.json()["error"]
        assert error["code"] == 500 and "CUDA out of memory: 3 GiB" in error["message"]
        assert answer.status_code == (200 if stream else 500)
    request = {"prompt": "x", "max_tokens": 20, "temperature": 0}
    assert [ask(url, request)] == offline_texts(drafting_llm("off", model), [request])
    assert "CUDA out of memory: 3 GiB" in caplog.text
    assert CLIENT.get(f"{url}/health").status_code == 200
    count = metric(url, 'request_success_total{engine="0",finished_reason="error".*}')
    assert count == len(failed)
    wait_until(lambda: idle(serving, url))


def fail(error: BaseException):
    raise error


@pytest.mark.parametrize(
    "error, requests", [(SystemExit("gone"), 1), (RuntimeError("broken"), MOST_FAILED_STEPS)]
)
def test_engine_that_dies_ends_the_server(drafting_llm, model, monkeypatch, error, requests):
    """At once, or when steps fail one after the other."""
    llm, listening = drafting_llm("off", model), bind("127.0.0.1", 0)
    monkeypatch.setattr(llm.engine, "step", lambda: fail(error))
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    with ThreadPoolExecutor(1) as pool:
        server = pool.submit(serve_app, llm, ServeFlags(served_model_name=("tiny",)), listening)
        for _ in range(requests):
            request = {"prompt": "x", "max_tokens": 2}
            assert CLIENT.post(f"{url}/v1/completions", json=request).status_code == 500
        with pytest.raises(SystemExit) as exit_code:
            server.result(30)
    assert exit_code.value.code == 1


@pytest.mark.parametrize("stream", [False, True])
def test_request_that_the_shutdown_ends_has_an_answer(drafting_llm, model, monkeypatch, stream):
    """uvicorn cancels what runs after --shutdown-timeout."""
    llm, options = drafting_llm("off", model), ServerOptions(served_model_name=("tiny",))
    monkeypatch.setattr(llm.engine, "step", slow(llm.engine.step))
    sent = asyncio.run(cancelled(make_app(llm, options), LONG | {"stream": stream}))
    body = b"".join(message.get("body", b"") for message in sent[1:]).decode()
    assert sent[0]["status"] == (200 if stream else 503) and not sent[-1].get("more_body")
    if stream:
        *texts, body, done = [line for line in body.splitlines() if line]
        assert texts and done == "data: [DONE]"
    error = json.loads(body.removeprefix("data: "))["error"]
    assert (error["message"], error["type"]) == (SHUTTING_DOWN, "server_error")


def slow(step):
    def slept():
        time.sleep(0.02)
        return step()

    return slept


async def cancelled(app, request: dict) -> list[dict]:
    """What the app sends for a request whose task is cancelled within its answer."""
    body = iter([{"type": "http.request", "body": json.dumps(request).encode()}])
    sent = []

    async def receive():
        return next(body, None) or await asyncio.Event().wait()

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
    server = app.state.server
    async with app.router.lifespan_context(app):
        task = asyncio.create_task(app(scope, receive, send))
        while not server.engine.num_running or (request["stream"] and len(sent) < 3):
            await asyncio.sleep(0.01)
        task.cancel()
        await task
        assert server.engine.in_flight == 0
    return sent


def test_engine_whose_device_is_lost_is_unhealthy(serving, drafting_llm, model, monkeypatch):
    llm = drafting_llm("off", model)
    url = serving(llm)
    monkeypatch.setattr(llm.engine, "step", lambda: fail(RuntimeError("an illegal address")))
    monkeypatch.setattr(llm.engine.target, "device", torch.device("meta"))  # cannot compute
    statuses = [CLIENT.post(f"{url}/v1/completions", json={"prompt": "x"}).status_code]
    wait_until(lambda: serving.server(url).engine.failure is not None)
    statuses.append(CLIENT.post(f"{url}/v1/completions", json={"prompt": "x"}).status_code)
    statuses.append(CLIENT.get(f"{url}/health").status_code)
    assert statuses == [500, 503, 503]


def test_steps_that_fail_now_and_then_leave_the_engine_healthy(
    serving, drafting_llm, model, monkeypatch
):
    llm = drafting_llm("off", model)
    url, step = serving(llm), llm.engine.step
    few = [False] * (MOST_FAILED_STEPS - 1)
    works = iter([*few, True, *few])
    monkeypatch.setattr(llm.engine, "step", lambda: step() if next(works) else fail(OSError("no")))
    request = {"prompt": "x", "max_tokens": 1}
    statuses = [
        CLIENT.post(f"{url}/v1/completions", json=request).status_code
        for _ in range(2 * len(few) + 1)
    ]
    assert statuses == [*[500] * len(few), 200, *[500] * len(few)]
    assert CLIENT.get(f"{url}/health").status_code == 200
