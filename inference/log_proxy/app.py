"""The proxy as an application: what it forwards, and what it keeps of it for the log."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import httpx2
from starlette.routing import Router
from starlette.types import Receive, Scope, Send

from draftsmith.inference.log_proxy.exchanges import read_exchanges
from draftsmith.inference.log_proxy.forwarding import Forwarder, Headers, Listener
from draftsmith.inference.log_proxy.upstream_counters import UpstreamCounters
from draftsmith.inference.traffic_log.recorder import Draw, Recorder

LOGGED = ("/v1/completions", "/v1/chat/completions")
MOST_BYTES = 4 * 1024**2  # of a request and its answer; longer ones are not logged
HEALTH_TIMEOUT_S = 5.0


class Capture(Listener):
    """The bytes of a request that may be logged, and of its answer."""

    def __init__(self, draw: Draw) -> None:
        self._draw = draw
        self._request: list[bytes] = []
        self._answer: list[bytes] = []
        self._size = 0
        self._readable = False  # an answer that is logged: no error, and not compressed
        self._events = False

    def request_piece(self, piece: bytes) -> None:
        """The next bytes of the request's body."""
        self._add(self._request, piece)

    def begin(self, status: int, headers: Headers) -> None:
        """The head of the answer."""
        values = {name.lower(): value for name, value in headers}
        self._readable = status == 200 and b"content-encoding" not in values
        self._events = values.get(b"content-type", b"").startswith(b"text/event-stream")

    def piece(self, piece: bytes) -> None:
        """The next bytes of the answer's body."""
        if self._readable:
            self._add(self._answer, piece)

    def hand_over(self, recorder: Recorder) -> None:
        """Has what was exchanged written."""
        if self._readable and self._size <= MOST_BYTES:
            request = b"".join(self._request)
            answer = b"".join(self._answer)
            exchanges = partial(read_exchanges, self._draw.time, request, answer, self._events)
            recorder.record(self._draw, exchanges, self._size)

    def _add(self, pieces: list[bytes], piece: bytes) -> None:
        self._size += len(piece)
        if self._size > MOST_BYTES:
            pieces.clear()
        else:
            pieces.append(piece)


class LogProxy:
    """The ASGI application: every request is forwarded, those of LOGGED are recorded too."""

    def __init__(self, forwarder: Forwarder, recorder: Recorder) -> None:
        self._forwarder = forwarder
        self._recorder = recorder

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Of HTTP alone: a websocket is refused."""
        if scope["type"] != "http":
            await send({"type": "websocket.close"})
            return
        if scope["path"] == "/health" and scope["method"] in ("GET", "HEAD"):
            await self._health(send)
            return
        draw = None
        if scope["method"] == "POST" and scope["path"] in LOGGED:
            draw = self._recorder.draw()
        if draw is None:
            await self._forwarder.forward(scope, receive, send, Listener())
            return
        capture = Capture(draw)
        try:
            await self._forwarder.forward(scope, receive, send, capture)
        finally:
            capture.hand_over(self._recorder)

    async def _health(self, send: Send) -> None:
        """The status of the server behind, with the state of the log: a log that fails is no reason
        to send nobody here."""
        try:
            status, _ = await self._forwarder.get(b"/health", HEALTH_TIMEOUT_S)
        except httpx2.HTTPError:
            status = 502
        body = json.dumps({"log": self._recorder.health()}).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def make_proxy(upstream: str, recorder: Recorder) -> Router:
    """The application before the server at `upstream`; the recorder is closed with it."""
    forwarder = Forwarder(upstream)
    counters = UpstreamCounters(forwarder, recorder)

    @asynccontextmanager
    async def lifespan(app: Router) -> AsyncIterator[None]:
        watching = asyncio.create_task(counters.watch())
        yield
        watching.cancel()
        await counters.read()
        await forwarder.close()
        await asyncio.to_thread(recorder.close)

    return Router(default=LogProxy(forwarder, recorder), lifespan=lifespan)
