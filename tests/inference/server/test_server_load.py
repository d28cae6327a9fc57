"""Many clients at a time: nobody's answer depends on the others, on who hangs up, or on whose
request breaks."""

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
from inference.spec_decode.proposers.ngram import NgramProposer
from tests.forked import Forked
from tests.inference.modules import make_llm

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
    rejected = 'vllm:admission_rejections_total{model_name="tiny",reason="max_num_queued_reqs"} 1.0'
    assert rejected in CLIENT.get(f"{url}/metrics").text


@pytest.mark.parametrize("stream", [False, True])
def test_no_request_takes_longer_than_allowed(serving, drafting_llm, model, stream):
    url = serving(drafting_llm("off", model, max_num_seqs=1), request_timeout_s=0.2)
    engine = serving.server(url).llm.engine
    step, slow = engine.step, lambda: (time.sleep(0.05), step())[1]
    engine.step = slow
    answer = CLIENT.post(f"{url}/v1/completions", json=LONG | {"stream": stream})
    if stream:
        error = list(events_of(answer))[-1]["error"]
    else:
        assert answer.status_code == 408 and answer.headers["x-should-retry"] == "false"
        error = answer.json()["error"]
    assert error["type"] == "TimeoutError" and "0.2 s" in error["message"]
    wait_until(lambda: idle(serving, url))
    engine.step = step
    assert (
        CLIENT.post(
            f"{url}/v1/completions", json=LONG | {"stream": False, "max_tokens": 2}
        ).status_code
        == 200
    )


def events_of(answer):
    return [
        json.loads(line[6:]) for line in answer.text.splitlines() if line and line != "data: [DONE]"
    ]


class Breaking(NgramProposer):
    """Fails whenever a request that begins with `!` has written a few tokens."""

    def propose(self, requests, limits):
        for request in requests:
            if request.token_ids[0] == self.poison and len(request.output_token_ids) > 4:
                raise RuntimeError(
                    "a message that quotes a " + "".join(["s", "e", "c", "r", "e", "t"])
                )
        return super().propose(requests, limits)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_breaks_does_not_touch_the_others(
    serving, drafting_llm, model, byte_tokenizer, caplog, stream
):
    proposer = Breaking(3, 1, 3)
    (proposer.poison,) = byte_tokenizer("!").input_ids
    url = serving(make_llm(model, tokenizer=byte_tokenizer, proposer=proposer, max_num_seqs=4))
    requests = mixed(12)
    bad = {"prompt": "!secret", "max_tokens": 30, "temperature": 0, "stream": stream}
    with ThreadPoolExecutor(13) as pool:
        broken = pool.submit(CLIENT.post, f"{url}/v1/completions", json=bad)
        texts = list(pool.map(lambda each: ask(url, each), requests))
    answer = broken.result()
    error = events_of(answer)[-1]["error"] if stream else answer.json()["error"]
    assert error["code"] == 500 and answer.status_code == (200 if stream else 500)
    assert texts == offline_texts(drafting_llm("ngram", model), requests)
    assert "RuntimeError" in caplog.text and "secret" not in caplog.text + answer.text
    assert CLIENT.get(f"{url}/health").status_code == 200
    assert 'finished_reason="error",model_name="tiny"} 1.0' in CLIENT.get(f"{url}/metrics").text


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


@pytest.mark.slow
def test_sigterm(saved):
    """What runs is finished, and the process ends well. The command is the one that guides start
    vLLM with."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    drafting = {"method": "ngram", "num_speculative_tokens": 3}
    command = [
        "-m",
        "inference.server",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--model",
        saved,
    ]
    command += ["--seed", "42", "-tp", "1", "--gpu_memory_utilization", "0.8"]
    command += ["--speculative_config", json.dumps(drafting)]
    process = Forked(command)
    url = f"http://127.0.0.1:{port}"
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


def _answers(url: str, process: Forked) -> bool:
    assert process.poll() is None, process.stdout.read()
    try:
        return CLIENT.get(f"{url}/health").status_code == 200
    except httpx2.TransportError:
        return False
