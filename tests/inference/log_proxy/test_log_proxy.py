"""The proxy changes nothing: bytes, breaks and departures go through; and what it logs is what was
exchanged. The server behind it is an application of this file, over real connections."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import socket
import threading
import time
from collections.abc import Callable

import httpx2
import pytest
import uvicorn

from draftsmith.inference.log_proxy.app import make_proxy
from draftsmith.inference.traffic_log.log_options import LogOptions
from draftsmith.inference.traffic_log.reader import read_log
from draftsmith.inference.traffic_log.recorder import Recorder

CLIENT = httpx2.Client(timeout=20)
CHATS = "/v1/chat/completions"
KEY = "sk-of-a-user"
CHAT = {
    "model": "m",
    "messages": [{"role": "user", "content": "hi"}],
    "stream": True,
    "temperature": 0,
    "user": "jane",
}
PIECES = [
    b'data: {"model":"m","choices":[{"index":0,"delta":{"role":"assistant","content":""}}],'
    b'"prompt_token_ids":[7,8]}\n\n',
    b'data: {"model":"m",  "choices":[{"index":0,"delta":{"content":"h\xc3\xa4"},"token_ids":[1]'
    b"}]}",
    b'\n\ndata: {"model":"m","choices":[{"index":0,"delta":{"content":"!"},"token_ids":[2, 3],'
    b'"finish_reason":"stop"}]}\n\n',
    b"data: [DONE]\n\n",
]


class Behind:
    """The server behind. /v1/chat/completions streams PIECES, the second once `go` is set, and
    breaks off before the third if `breaks`; a path that ends in /wait never answers; another is
    answered with what arrived."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.go.set()
        self.breaks = False
        self.arrived = threading.Event()
        self.left = threading.Event()

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] != "http":
            return
        body = b""
        more = True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        if scope["method"] == "POST":
            self.arrived.set()
        if scope["path"].endswith("/wait"):
            await self._departure(receive)
        elif scope["path"].startswith(CHATS):
            await self._stream(receive, send)
        else:
            await self._echo(scope, body, send)

    async def _departure(self, receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.left.set()

    async def _stream(self, receive, send) -> None:
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        leaving = asyncio.create_task(self._departure(receive))
        for number, piece in enumerate(PIECES):
            while number == 1 and not self.go.is_set():
                await asyncio.sleep(0.005)
            if number == 2 and self.breaks:
                return
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
        leaving.cancel()

    async def _echo(self, scope, body, send) -> None:
        hop = (b"host", b"connection")
        seen = [scope["method"], scope["raw_path"].decode(), scope["query_string"].decode()]
        seen += sorted(f"{name}{value}" for name, value in scope["headers"] if name not in hop)
        answer = json.dumps([*seen, len(body), hashlib.sha256(body).hexdigest()]).encode()
        headers = [(b"Set-Cookie", b"a=1"), (b"Set-Cookie", b"b=2"), (b"X-Odd", b"\xe4")]
        status = 418 if body else 200
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": answer})


@pytest.fixture
def running():
    """running(app): the address of an application that is served until the test ends."""
    stops: list[Callable[[], None]] = []

    def start(app) -> str:
        config = uvicorn.Config(
            app,
            port=0,
            http="h11",  # httptools, where it is installed, refuses a length beside chunks
            log_config=None,
            timeout_graceful_shutdown=1,
            server_header=False,
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.005)

        def stop() -> None:
            server.should_exit = True
            thread.join(10)

        stops.append(stop)
        start.stop = stop
        return f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"

    yield start
    for stop in reversed(stops):
        stop()


@pytest.fixture
def behind():
    return Behind()


@pytest.fixture
def urls(running, behind, tmp_path):
    """(address of the server behind, of the proxy); the proxy's log is in tmp_path / "log"."""
    direct = running(behind)
    recorder = Recorder(tmp_path / "log", LogOptions())
    return direct, running(make_proxy(direct, recorder))


def whole(url: str, method: str, path: str, content, headers) -> tuple:
    """An answer as it came; the date is the server's and not the answer's."""
    with httpx2.stream(method, url + path, content=content, headers=headers) as answer:
        fields = [pair for pair in answer.headers.raw if pair[0].lower() != b"date"]
        return answer.status_code, fields, b"".join(answer.iter_raw())


HOSTILE = {
    "no body": ("GET", "/v1/models", None, {}),
    "head": ("HEAD", "/v1/models", None, {}),
    "odd path": ("DELETE", "/a%2Fb/../%7Ec//d?x=%20&x=%zz&y", None, {}),
    "options": ("OPTIONS", "/v1/completions", None, {"origin": "http://x"}),
    "no json": ("POST", "/v1/completions", b"{nope", {"content-type": "application/json"}),
    "wrong type": ("POST", "/v1/completions", b"\x00\xff", {"content-type": "image/png"}),
    "surrogate": ("POST", "/v1/completions", b'{"prompt": "\\ud800"}', {}),
    "deep": ("POST", "/v1/completions", b"[" * 100_000, {}),
    "huge": ("POST", "/v1/completions", b"x" * 6_000_000, {}),
    "chunked": ("POST", "/v1/completions", [b"{", b"}" * 100], {}),
    "compressed": ("POST", "/v1/completions", b"\x1f\x8b", {"content-encoding": "gzip"}),
    "empty": ("POST", "/v1/completions", b"", {"authorization": f"Bearer {KEY}"}),
    "of one connection": ("GET", "/v1/models", None, {"x-own": "1", "te": "trailers"}),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_proxy_request_and_answer_are_the_same_byte_for_byte(urls, case):
    method, path, content, headers = HOSTILE[case]
    if case == "of one connection":
        with CLIENT.stream(
            "GET", urls[1] + path, headers={**headers, "connection": "x-own, te"}
        ) as answer:
            assert "x-own" not in answer.read().decode()
        return
    answers = []
    for url in urls:
        pieces = iter(content) if isinstance(content, list) else content
        answers.append(whole(url, method, path, pieces, headers))
    assert answers[0] == answers[1]


RAW = {  # what httpx2 does not send
    "absolute form": b"GET http://other.example/v1/models HTTP/1.1\r\n",
    "star": b"OPTIONS * HTTP/1.1\r\n",
    "length and chunks": b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n"
    b"Content-Length: 3\r\n",
}


@pytest.mark.parametrize("case", RAW)
def test_proxy_raw_request_arrives_as_it_does_without_the_proxy(urls, case):
    """Target and body; a length beside chunks is overridden by them."""
    body = b"4\r\nabcd\r\n0\r\n\r\n" if case == "length and chunks" else b""
    answers = []
    for url in urls:
        address = httpx2.URL(url)
        with socket.create_connection((address.host, address.port), timeout=20) as connection:
            connection.sendall(RAW[case] + b"Host: x\r\nConnection: close\r\n\r\n" + body)
            with connection.makefile("rb") as answer:
                status = answer.readline()
                echo = re.search(rb"\[.*\]", answer.read())
        fields = [f"{field}" for field in json.loads(echo[0])]
        lengths = [field for field in fields if field.startswith("b'content-length'")]
        answers.append((status, [field for field in fields if field not in lengths]))
    assert answers[0] == answers[1]
    assert not lengths


def test_proxy_hands_on_a_piece_before_the_next_is_there(urls, behind):
    behind.go.clear()
    with CLIENT.stream("POST", urls[1] + CHATS, json=CHAT) as answer:
        pieces = answer.iter_raw()
        assert next(pieces) == PIECES[0]
        behind.go.set()
        assert b"".join(pieces) == b"".join(PIECES[1:])


def test_proxy_64_streams_at_a_time_have_their_bytes(urls):
    async def ask(client) -> bytes:
        async with client.stream("POST", urls[1] + CHATS, json=CHAT) as answer:
            return b"".join([piece async for piece in answer.aiter_raw()])

    async def ask_all() -> list[bytes]:
        limits = httpx2.Limits(max_connections=None)
        async with httpx2.AsyncClient(limits=limits, timeout=20) as client:
            return await asyncio.gather(*(ask(client) for _ in range(64)))

    assert set(asyncio.run(ask_all())) == {b"".join(PIECES)}


@pytest.mark.parametrize("path", [CHATS, "/v1/wait"])
def test_proxy_client_that_leaves_is_seen_behind(urls, behind, path):
    """Within an answer, and before it begins."""
    behind.go.clear()

    async def leave() -> None:
        async with httpx2.AsyncClient(timeout=20) as client:
            asking = asyncio.create_task(client.post(urls[1] + path, json=CHAT))
            await asyncio.to_thread(behind.arrived.wait, 10)
            asking.cancel()

    asyncio.run(leave())
    assert behind.left.wait(10)


def test_proxy_answer_that_is_broken_off_is_broken_for_the_client(urls, behind):
    behind.breaks = True
    with pytest.raises(httpx2.RemoteProtocolError):
        CLIENT.post(urls[1] + CHATS, json=CHAT)


def test_proxy_without_a_server_behind_answers_502(running, tmp_path):
    url = running(make_proxy("http://127.0.0.1:9", Recorder(tmp_path, LogOptions())))
    answer = CLIENT.post(url + CHATS, json=CHAT)
    assert answer.status_code == 502 and answer.json()["error"]["message"]
    assert CLIENT.get(f"{url}/health").status_code == 502


def test_proxy_logs_what_was_exchanged_and_no_path_or_key(urls, running, tmp_path):
    headers = {"authorization": f"Bearer {KEY}", "cookie": KEY}
    path = f"{CHATS}?key={KEY}"
    assert CLIENT.post(urls[1] + path, json=CHAT, headers=headers).status_code == 200
    CLIENT.post(urls[1] + "/v1/completions", content=b"{nope")
    running.stop()
    (one,) = read_log(tmp_path / "log")
    assert (one.model, one.messages, one.text) == ("m", CHAT["messages"], "hä!")
    assert (one.prompt_token_ids, one.token_ids) == ([7, 8], [1, 2, 3])
    assert (one.finish_reason, one.sampling) == ("stop", {"temperature": 0})
    written = b"".join(file.read_bytes() for file in (tmp_path / "log").iterdir())
    for private in (KEY, "jane", "completions?", "127.0.0.1"):
        assert private.encode() not in written


def test_proxy_whose_log_fails_serves_and_says_so(running, behind, tmp_path):
    (tmp_path / "hook.py").write_text("def redact(exchange):\n    raise ValueError")
    recorder = Recorder(tmp_path / "log", LogOptions(log_redact=tmp_path / "hook.py"))
    url = running(make_proxy(running(behind), recorder))
    assert CLIENT.get(f"{url}/health").json()["log"]["ok"]
    assert CLIENT.post(url + CHATS, json=CHAT).content == b"".join(PIECES)
    while not recorder.health()["failed"]:
        time.sleep(0.005)
    health = CLIENT.get(f"{url}/health")
    assert health.status_code == 200 and health.json()["log"]["error"] == "ValueError"
    assert CLIENT.post(url + CHATS, json=CHAT).content == b"".join(PIECES)
