"""Clients that are slow, odd or hostile, byte by byte: each is answered or let go, and the others
do not notice."""

from __future__ import annotations

import json
import socket
import threading
import time

import httpx2
import pytest
import torch

CLIENT = httpx2.Client(timeout=120)
PATH = "/v1/completions"
GOOD = {"prompt": "x", "temperature": 0, "max_tokens": 4}


@pytest.fixture(scope="module")
def model(tiny_model, byte_tokenizer):
    model = tiny_model("qwen3", vocab_size=len(byte_tokenizer), max_position_embeddings=256)
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture
def url(serving, drafting_llm, model):
    return serving(drafting_llm("ngram", model), request_timeout_s=60, max_body_bytes=1 << 20)


def connect(url: str) -> socket.socket:
    host, _, port = url.removeprefix("http://").partition(":")
    return socket.create_connection((host, int(port)), timeout=120)


def spoken(body: bytes, version: str = "1.1", *headers: str) -> bytes:
    lines = [
        f"POST {PATH} HTTP/{version}",
        "Host: x",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
    ]
    return "\r\n".join([*lines, *headers, "", ""]).encode() + body


def heard(connection: socket.socket) -> bytes:
    """All that is said until the server closes."""
    told = b""
    while piece := connection.recv(65536):
        told += piece
    return told


def fine(url: str) -> str:
    """The text of a request like any other."""
    answer = CLIENT.post(url + PATH, json=GOOD)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def test_http_1_0_and_requests_in_one_breath(url):
    expected, body = fine(url), json.dumps(GOOD).encode()
    with connect(url) as old:
        old.sendall(spoken(body, "1.0"))
        told = heard(old)
    assert (
        told.startswith(b"HTTP/1.1 200")
        and json.loads(told.partition(b"\r\n\r\n")[2])["choices"][0]["text"] == expected
    )
    with connect(url) as eager:
        longer = json.dumps(GOOD | {"max_tokens": 5}).encode()
        eager.sendall(spoken(body) + spoken(longer) + spoken(body, "1.1", "Connection: close"))
        told = heard(eager)
    assert told.count(b"HTTP/1.1 200") == 3
    places = [told.index(b'"completion_tokens":4'), told.index(b'"completion_tokens":5')]
    assert places == sorted(places)


@pytest.mark.parametrize(
    "head",
    [
        b"POST "
        + PATH.encode()
        + b" HTTP/1.1\r\nHost: x\r\n"
        + b"X-A: "
        + b"a" * 2_000_000
        + b"\r\n\r\n",
        b"GET /health HTTP/1.1\r\n"
        + b"".join(b"X-%d: y\r\n" % i for i in range(100_000))
        + b"\r\n",
        b"GET /" + b"a" * 1_000_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 100,
        spoken(b"{}", "1.1", "Content-Length: 5"),
        spoken(b"{}", "1.1", "Content-Length: -5"),
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
    ids=[
        "long header",
        "many headers",
        "long path",
        "TLS",
        "two lengths",
        "negative length",
        "no chunk",
    ],
)
def test_heads_that_nobody_sends(url, head):
    expected = fine(url)
    with connect(url) as flood:
        try:
            flood.sendall(head)
            flood.shutdown(socket.SHUT_WR)
            told = heard(flood)
        except OSError:  # it was closed before all was sent
            told = b""
    assert not told or told.split()[1][:1] in (b"4", b"2")
    assert fine(url) == expected


BODIES = [
    b"[" * 100_000,
    b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    b'{"prompt": "x", "metadata": ' + b'{"a":' * 800 + b"1" + b"}" * 800 + b"}",
    b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}",
    b'{"prompt": "x", "temperature": 1e999}',
    b'{"prompt": "x", "top_p": NaN}',
    b'{"prompt": "\\ud800"}',
    b"\xff\xfe{}",
    b"",
    b"null",
    b'{"prompt": "x", "n": 1000000000}',
    b'{"prompt": "x", "stop": ' + json.dumps(["s"] * 1000).encode() + b"}",
    (
        b'{"prompt": "x", "response_format": {"type": "json_schema", "json_schema": {"name": "a",'
        b' "schema": {"$ref": "#"}}}, "max_tokens": 3}'
    ),
]
TYPES = [
    "application/json",
    "text/plain",
    "application/x-www-form-urlencoded",
    "multipart/form-data",
    "",
    "a;b;=c",
]


@pytest.mark.slow
def test_bodies_and_types_that_nobody_sends(url):
    expected = fine(url)
    for body in BODIES:
        answer = CLIENT.post(url + PATH, content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code in (200, 400), (body[:60], answer.status_code, answer.text[:200])
    for kind in TYPES:
        answer = CLIENT.post(url + PATH, content=json.dumps(GOOD), headers={"Content-Type": kind})
        assert answer.status_code in (200, 400), (kind, answer.text)
    answer = CLIENT.post(
        url + PATH, content=json.dumps(GOOD), headers={"Content-Type": "text/plain"}
    )
    assert answer.status_code == 400 and "application/json" in answer.json()["error"]["message"]
    answer = CLIENT.post(url + PATH, content=b"\x1f\x8b", headers={"Content-Encoding": "gzip"})
    assert answer.status_code == 400 and fine(url) == expected


@pytest.mark.parametrize(
    "odd",
    [
        {"logit_bias": {"5": 1e308, "6": 1e308}},
        {"logit_bias": {str(i): -1e308 for i in range(259)}},
        {"repetition_penalty": 1e-308},
        {"repetition_penalty": 1e308},
        {"temperature": 1e308},
        {"top_p": 1e-308},
        {"top_k": 1, "min_p": 1.0},
        {"allowed_token_ids": [7] * 500},
        {"bad_words": ["\U0001f600", "x", "é"]},
        {"prompt": "\U0001f468‍\U0001f469‍\U0001f467 ‮ẍ\u0000￿"},
        {"stop": ["\U0001f600"], "prompt": "é" * 60},
        {"structured_outputs": {"choice": ["\U0001f600", "é"]}},
    ],
)
@pytest.mark.parametrize("temperature", [0, 1])
def test_parameters_at_their_ends(url, odd, temperature):
    """What is allowed is answered; what cannot be done is named."""
    expected = fine(url)
    answer = CLIENT.post(url + PATH, json=GOOD | {"temperature": temperature, "seed": 1} | odd)
    assert answer.status_code in (200, 400), answer.text
    assert fine(url) == expected


@pytest.mark.slow
def test_a_body_that_does_not_come(serving, drafting_llm, model):
    """Whoever sends it a byte a second is not waited for longer than for an answer."""
    url = serving(drafting_llm("ngram", model), request_timeout_s=2)
    with connect(url) as slow:
        slow.sendall(spoken(b"x" * 100)[:-60])
        assert fine(url)
        told = heard(slow)
    assert told.startswith(b"HTTP/1.1 408") and b"TimeoutError" in told


@pytest.mark.slow
def test_streams_that_nobody_reads(serving, drafting_llm, model):
    """They hold no row once they are written, and nobody waits for them."""
    url = serving(drafting_llm("ngram", model, max_num_seqs=2))
    body = json.dumps(GOOD | {"max_tokens": 200, "stream": True, "logprobs": 5}).encode()
    readers = [connect(url) for _ in range(6)]
    for each in readers:
        each.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        each.sendall(spoken(body))
    assert fine(url)
    scheduler = serving.server(url).llm.engine.scheduler
    end = time.monotonic() + 120
    while scheduler.has_unfinished and time.monotonic() < end:
        time.sleep(0.05)
    assert not scheduler.has_unfinished
    for each in readers:
        each.close()


class _Lost:
    """A device after a failed assertion: the step fails, and so does whatever is asked next."""

    def __init__(self, monkeypatch):
        self.gone, ones = False, torch.ones
        monkeypatch.setattr(
            torch, "ones", lambda *a, **k: self.fail() if self.gone else ones(*a, **k)
        )

    def fail(self, *_, **__):
        self.gone = True
        raise torch.AcceleratorError("CUDA error: device-side assert triggered")


def test_a_lost_device_ends_the_engine_and_says_so(serving, drafting_llm, model, monkeypatch):
    """No request is done again alone on a device that answers nothing; whoever watches /health is
    told why."""
    llm = drafting_llm("ngram", model)
    url, lost = serving(llm), _Lost(monkeypatch)
    fine(url)
    assert CLIENT.get(url + "/health").status_code == 200
    monkeypatch.setattr(llm.engine, "_forward", lost.fail)
    answer = CLIENT.post(url + PATH, json=GOOD)
    assert answer.status_code == 500, answer.text
    for refused in (CLIENT.get(url + "/health"), CLIENT.post(url + PATH, json=GOOD)):
        assert refused.status_code == 503
        assert (
            "answers no more (CUDA error: device-side assert triggered)"
            in refused.json()["error"]["message"]
        )


def test_a_step_that_fails_on_a_sound_device_ends_nobody_else(
    serving, drafting_llm, model, monkeypatch
):
    llm = drafting_llm("ngram", model)
    url, forward, left = serving(llm), llm.engine._forward, [1]

    def once(*given):
        if left:
            left.pop()
            raise torch.AcceleratorError("CUDA error: an error that passes")
        return forward(*given)

    monkeypatch.setattr(llm.engine, "_forward", once)
    assert fine(url) and not left
    assert CLIENT.get(url + "/health").status_code == 200


def test_no_port_is_open_before_every_shape_is_compiled(serving, drafting_llm, model, monkeypatch):
    llm, done = drafting_llm("ngram", model), []
    monkeypatch.setattr(
        llm,
        "warm_up",
        lambda *asked: time.sleep(0.3) or done.append(threading.current_thread().name) or 3,
    )
    url = serving(llm)
    assert done == ["engine"] and fine(url)  # in the thread that runs the rounds
