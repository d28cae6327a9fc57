"""Many clients at a time: nobody's answer depends on the others or on who hangs up; a step that
fails ends its requests, and the next one is served."""

from __future__ import annotations

import json
import re
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest

from inference import SamplingParams
from tests.forked import Forked

CLIENT = httpx2.Client(timeout=60, limits=httpx2.Limits(max_connections=None))
LONG = {"prompt": "a long answer", "max_tokens": 230, "temperature": 0, "stream": True}


@pytest.fixture(scope="module")
def model(tiny_model, byte_tokenizer):
    model = tiny_model("qwen3", vocab_size=len(byte_tokenizer), max_position_embeddings=256)
    model.generation_config.eos_token_id = None
    return model


def mixed(count: int) -> list[dict]:
    """Requests of all kinds: a third greedy, the others with seeds of their own."""
    kinds = [
        {"temperature": 0},
        {"temperature": 1.0, "top_p": 0.9, "repetition_penalty": 1.2},
        {"temperature": 0.7, "top_k": 20, "min_p": 0.01, "frequency_penalty": 0.3},
    ]
    texts = [f"{'request ' * (i % 5)}{i}" for i in range(count)]
    own = [
        {"prompt": text, "max_tokens": 8 + i % 29} | kinds[i % 3] for i, text in enumerate(texts)
    ]
    return [each | ({} if each["temperature"] == 0 else {"seed": i}) for i, each in enumerate(own)]


def offline_texts(llm, requests) -> list[str]:
    params = [
        SamplingParams(**{k: v for k, v in each.items() if k != "prompt"}) for each in requests
    ]
    outputs = llm.generate([each["prompt"] for each in requests], params, False)
    return [output.outputs[0].text for output in outputs]


def ask(url: str, request: dict) -> str:
    """The text of a completion, from whole answers and streams in turn."""
    if request.get("seed", 0) % 2:
        answer = CLIENT.post(f"{url}/v1/completions", json=request)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["text"]
    text = ""
    with CLIENT.stream("POST", f"{url}/v1/completions", json=request | {"stream": True}) as answer:
        for data in events(answer):
            text += data["choices"][0]["text"]
    return text


def events(answer):
    """The events of a stream, which must end as one."""
    assert answer.status_code == 200
    ended = False
    for line in answer.iter_lines():
        if line == "data: [DONE]":
            ended = True
        elif line:
            yield json.loads(line.removeprefix("data: "))
    assert ended


def hang_up(url: str, request: dict) -> None:
    """Reads a little of a stream, or nothing of a whole answer, and goes."""
    if request["stream"]:
        with CLIENT.stream("POST", f"{url}/v1/completions", json=request) as answer:
            next(answer.iter_lines())
    else:
        with pytest.raises(httpx2.TimeoutException):
            CLIENT.post(f"{url}/v1/completions", json=request, timeout=0.05)


def wait_until(holds, seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it never became so"
        time.sleep(0.01)


def idle(serving, url) -> bool:
    server = serving.server(url)
    return (
        not server.llm.engine.has_unfinished
        and server.engine.in_flight == 0
        and not server.engine._active
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fake", "ngram"])
def test_32_at_a_time(serving, drafting_llm, model, kind):
    """Greedy answers are those of the target alone, and seeds mean what they mean offline; ten hang
    up meanwhile."""
    requests = mixed(32)
    url = serving(drafting_llm(kind, model, max_num_seqs=6), max_num_queued_reqs=64)
    leaving = [LONG | {"prompt": f"leaving {i}", "stream": i % 2 == 0} for i in range(10)]
    with ThreadPoolExecutor(42) as pool:
        gone = [pool.submit(hang_up, url, each) for each in leaving]
        texts = list(pool.map(lambda each: ask(url, each), requests))
        for each in gone:
            each.result()
    greedy = [each for each in requests if each["temperature"] == 0]
    alone = offline_texts(drafting_llm("off", model), greedy)
    assert [texts[requests.index(each)] for each in greedy] == alone
    assert texts == offline_texts(drafting_llm(kind, model, max_num_seqs=6), requests)
    wait_until(lambda: idle(serving, url))
    metrics = CLIENT.get(f"{url}/metrics").text
    finished = re.search(
        r'request_success_total\{engine="0",finished_reason="length",model_name="tiny"\} (\d+)',
        metrics,
    )
    assert (
        finished is not None and 32 <= int(finished[1]) < 42
    )  # an answer may end before its reader has gone


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
    head = [
        "POST /v1/completions HTTP/1.1",
        "Host: x",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
    ]
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as client:
        client.sendall("\r\n".join([*head, "", ""]).encode() + body)
        wait_until(lambda: len(rounds) == 5)
        (request,) = engine.scheduler.running
    wait_until(lambda: server.engine.in_flight == 0)
    go_on.set()
    wait_until(lambda: idle(serving, url))
    assert request.finish_reason == "abort" and len(rounds) <= 6


def test_a_full_queue_refuses(serving, drafting_llm, model):
    url = serving(drafting_llm("off", model, max_num_seqs=1), max_num_queued_reqs=1)
    server, asked = serving.server(url), LONG | {"max_tokens": 60}
    with ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(CLIENT.post, f"{url}/v1/completions", json=asked) for _ in range(2)]
        wait_until(lambda: server.engine.in_flight == 2)
        refused = CLIENT.post(f"{url}/v1/completions", json=asked)
        assert refused.status_code == 429 and refused.json()["error"]["type"] == "RateLimitError"
        assert int(refused.headers["Retry-After"]) >= 1
        assert (
            'vllm:num_requests_waiting{engine="0",model_name="tiny"} 1.0'
            in CLIENT.get(f"{url}/metrics").text
        )
        assert [answer.result().status_code for answer in answers] == [200, 200]
    assert CLIENT.post(f"{url}/v1/completions", json=asked).status_code == 200
    rejected = 'vllm:admission_rejections_total{engine="0",model_name="tiny"} 1.0'
    assert rejected in CLIENT.get(f"{url}/metrics").text


def events_of(answer):
    return [
        json.loads(line[6:]) for line in answer.text.splitlines() if line and line != "data: [DONE]"
    ]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("method", ["propose", "_decide", "_forward"])
def test_a_step_that_fails_ends_its_requests_and_the_next_is_served(
    serving, drafting_llm, model, caplog, method, stream, monkeypatch
):
    """Each with a 500 and the reason, which the log has too; who waits is served."""
    llm = drafting_llm("ngram", model, max_num_seqs=2)
    url = serving(llm)
    owner = llm.engine.proposer if method == "propose" else llm.engine
    works, calls = getattr(owner, method), []

    def fails_once(*given):
        calls.append(given)
        if len(calls) == 8:
            raise RuntimeError("CUDA out of memory: 3 GiB")
        return works(*given)

    monkeypatch.setattr(owner, method, fails_once)
    asked = LONG | {"stream": stream, "max_tokens": 100}
    with ThreadPoolExecutor(4) as pool:
        answers = list(
            pool.map(lambda _: CLIENT.post(f"{url}/v1/completions", json=asked), range(4))
        )
    failed = [answer for answer in answers if "RuntimeError" in answer.text]
    assert 1 <= len(failed) <= 2
    for answer in failed:
        error = events_of(answer)[-1]["error"] if stream else answer.json()["error"]
        assert error["code"] == 500 and "CUDA out of memory: 3 GiB" in error["message"]
        assert answer.status_code == (200 if stream else 500)
    asked = {"prompt": "x", "max_tokens": 20, "temperature": 0}
    (alone,) = offline_texts(drafting_llm("off", model), [asked])
    assert ask(url, asked) == alone
    assert "CUDA out of memory: 3 GiB" in caplog.text
    assert CLIENT.get(f"{url}/health").status_code == 200
    count = f'finished_reason="error",model_name="tiny"}} {float(len(failed))}'
    assert count in CLIENT.get(f"{url}/metrics").text
    wait_until(lambda: idle(serving, url))


def test_health_after_steps_that_fail_one_after_the_other(
    serving, drafting_llm, model, monkeypatch
):
    llm = drafting_llm("off", model)
    url = serving(llm)
    asked = {"prompt": "x", "max_tokens": 2}

    def fail(*_):
        raise RuntimeError("always")

    with monkeypatch.context() as broken:
        broken.setattr(llm.engine, "_forward", fail)
        for expected in (200, 200, 503):
            assert CLIENT.post(f"{url}/v1/completions", json=asked).status_code == 500
            assert CLIENT.get(f"{url}/health").status_code == expected
    assert CLIENT.post(f"{url}/v1/completions", json=asked).status_code == 200
    assert CLIENT.get(f"{url}/health").status_code == 200


def test_an_engine_that_dies_says_so(serving, drafting_llm, model, monkeypatch):
    llm = drafting_llm("off", model)
    url, told = serving(llm), threading.Event()
    serving.server(url).engine.on_failure = told.set
    monkeypatch.setattr(llm.engine, "step", lambda: (_ for _ in ()).throw(SystemExit("gone")))
    assert CLIENT.post(f"{url}/v1/completions", json={"prompt": "x"}).status_code == 500
    assert told.wait(10)
    assert CLIENT.get(f"{url}/health").status_code == 503


@pytest.fixture(scope="module")
def saved(model, byte_tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    model.save_pretrained(folder)
    byte_tokenizer.save_pretrained(folder)
    return str(folder)


def test_a_server_that_goes_tells_its_clients(serving, drafting_llm, model):
    """Once their time is up: whoever waits gets an error that can be read, and nobody new is
    taken."""
    url = serving(drafting_llm("off", model, max_num_seqs=1))
    server = serving.server(url)
    with ThreadPoolExecutor(3) as pool:
        answers = [
            pool.submit(CLIENT.post, f"{url}/v1/completions", json=LONG | {"stream": s})
            for s in (True, False)
        ]
        wait_until(lambda: len(server.engine._active) == 2)
        server.engine.drain(0)
        streamed, whole = (answer.result() for answer in answers)
    assert events_of(streamed)[-1]["error"]["code"] == 503 and whole.status_code == 503
    assert CLIENT.post(f"{url}/v1/completions", json=LONG).status_code == 503
    wait_until(lambda: idle(serving, url))


def test_no_request_is_taken_before_every_shape_is_compiled(
    serving, drafting_llm, model, monkeypatch
):
    llm, done = drafting_llm("ngram", model), []
    monkeypatch.setattr(
        llm,
        "warm_up",
        lambda *asked: time.sleep(0.3) or done.append(threading.current_thread().name) or 3,
    )
    url = serving(llm)
    assert done == ["engine_0"]  # the thread that runs the rounds
    assert ask(url, {"prompt": "x", "max_tokens": 2})


@pytest.mark.slow
def test_sigterm(saved):
    """What runs is finished, and the process ends well. The command is the one that guides start
    vLLM with."""
    process, url = started(
        saved,
        *("--seed", "42", "-tp", "1", "--gpu_memory_utilization", "0.8"),
        *("--speculative_config", '{"method": "ngram", "num_speculative_tokens": 3}'),
    )
    try:
        wait_until(lambda: _answers(url, process), 90)
        request = LONG | {"n": 8, "model": saved, "ignore_eos": True}
        with CLIENT.stream("POST", f"{url}/v1/completions", json=request) as answer:
            stream = events(answer)
            told = [next(stream)]
            process.send_signal(signal.SIGTERM)
            told += stream
        assert sum(each["choices"][0]["finish_reason"] == "length" for each in told) == 8
        log = process.communicate(timeout=30)[0]
        assert process.returncode == 0, log
        assert "a long answer" not in log and "Traceback" not in log
    finally:
        process.kill()


WARMS_UP_FOR_EVER = """
import time
from inference import LLM
LLM.warm_up = lambda *_: print("compiling", flush=True) or time.sleep(600)
"""
DIES_AT_ITS_FIRST_STEP = """
from inference.engine.engine import Engine
def step(self):
    raise SystemExit("gone")
Engine.step = step
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_server_that_warms_up(saved, number):
    process, _ = started(saved, code=WARMS_UP_FOR_EVER)
    try:
        while "compiling" not in (line := process.stdout.readline()):
            assert line, "it ended before"
        process.send_signal(number)
        assert process.wait(10) == 128 + number
    finally:
        process.kill()


@pytest.mark.slow
def test_an_engine_that_dies_ends_the_process(saved):
    process, url = started(saved, code=DIES_AT_ITS_FIRST_STEP)
    try:
        wait_until(lambda: _answers(url, process), 90)
        assert CLIENT.post(f"{url}/v1/completions", json={"prompt": "x"}).status_code == 500
        process.communicate(timeout=30)
        assert process.returncode == 1
    finally:
        process.kill()


@pytest.mark.slow
def test_a_second_signal_does_not_wait(saved):
    process, url = started(saved, "--shutdown-timeout", "60", "--max-model-len", "256")
    try:
        wait_until(lambda: _answers(url, process), 90)
        asked = LONG | {"n": 8, "model": saved, "ignore_eos": True, "max_tokens": 240}
        with CLIENT.stream("POST", f"{url}/v1/completions", json=asked) as answer:
            next(answer.iter_lines())
            process.send_signal(signal.SIGINT)
            wait_until(lambda: not _admits(url), 20)
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=10)
        assert process.returncode == 128 + signal.SIGINT
    finally:
        process.kill()


def started(folder: str, *flags: str, code: str = "") -> tuple[Forked, str]:
    """A server of that target in a process of its own, which may still be loading and runs `code`
    before."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    arguments = ["--host", "127.0.0.1", "--port", port, "--model", folder, *flags]
    command = ["-m", "inference.server", *arguments]
    if code:
        code += f"from inference.server.command import run; run({arguments})"
        command = ["-c", code]
    return Forked(command), f"http://127.0.0.1:{port}"


def _answers(url: str, process: Forked) -> bool:
    assert process.poll() is None, process.stdout.read()
    try:
        return CLIENT.get(f"{url}/health").status_code == 200
    except httpx2.TransportError:
        return False


def _admits(url: str) -> bool:
    """False once the listening socket is closed."""
    try:
        socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), 1).close()
    except OSError:
        return False
    return True
