"""Hands requests to the server behind and its answers to the client, as bytes: nothing is read,
added or held back.

What is about one connection alone (RFC 9110, 7.6.1) stays there. A client that leaves takes its
request with it; a server that breaks off an answer has it broken off for the client too."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import suppress

import httpx2
from starlette.types import Receive, Scope, Send

from draftsmith.inference.server.api_errors import APIError, error_json

logger = logging.getLogger(__name__)

OF_ONE_CONNECTION = {
    b"connection",
    b"keep-alive",
    b"proxy-authenticate",
    b"proxy-authorization",
    b"proxy-connection",
    b"te",
    b"trailer",
    b"transfer-encoding",
    b"upgrade",
}
OF_THE_REQUEST = {b"host", b"expect"}  # are this server's, as to its client
CONNECT_TIMEOUT_S = 10.0
# Less than the 5 s after which uvicorn, as in vLLM and here, closes a connection that is not used.
KEEP_ALIVE_S = 2.0

Headers = list[tuple[bytes, bytes]]


class Listener:
    """Is told what passes; must take microseconds, and raise nothing."""

    def request_piece(self, piece: bytes) -> None:
        """The next bytes of the request's body."""

    def begin(self, status: int, headers: Headers) -> None:
        """The head of the answer."""

    def piece(self, piece: bytes) -> None:
        """The next bytes of the answer's body."""


class Forwarder:
    """`upstream`: the address of the server behind, such as http://127.0.0.1:8000."""

    def __init__(self, upstream: str) -> None:
        url = httpx2.URL(upstream)
        self._origin = url.copy_with(raw_path=b"/")
        self._prefix = url.raw_path.rstrip(b"/")
        self._host = url.netloc
        limits = httpx2.Limits(
            max_connections=None, max_keepalive_connections=None, keepalive_expiry=KEEP_ALIVE_S
        )
        self._transport = httpx2.AsyncHTTPTransport(limits=limits, trust_env=False)

    async def close(self) -> None:
        """Closes all connections."""
        await self._transport.aclose()

    async def get(self, path: bytes, timeout_s: float) -> tuple[int, bytes]:
        """Status and body of a GET of this proxy's own. httpx2.HTTPError if there is none."""
        timeout = dict.fromkeys(("connect", "read", "write", "pool"), timeout_s)
        extensions = {"target": self._prefix + path, "timeout": timeout}
        headers = [(b"Host", self._host)]
        request = httpx2.Request("GET", self._origin, headers=headers, extensions=extensions)
        response = await self._transport.handle_async_request(request)
        try:
            return response.status_code, await response.aread()
        finally:
            await response.aclose()

    async def forward(self, scope: Scope, receive: Receive, send: Send, listener: Listener) -> None:
        """One request and its answer. Ends early if the client leaves."""
        body = _Body(receive, listener.request_piece, _has_body(scope))
        answering = asyncio.create_task(self._answer(scope, body, send, listener))
        leaving = asyncio.create_task(body.disconnected())
        try:
            await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            answering.cancel()
            with suppress(asyncio.CancelledError):
                await answering

    async def _answer(self, scope: Scope, body: _Body, send: Send, listener: Listener) -> None:
        try:
            response = await self._transport.handle_async_request(self._request(scope, body))
        except httpx2.TransportError as error:
            if not body.broken:
                await _send_error(send, error)
            return
        try:
            headers = _passed_on(response.headers.raw)
            listener.begin(response.status_code, headers)
            status = response.status_code
            await send({"type": "http.response.start", "status": status, "headers": headers})
            async for piece in response.aiter_raw():
                await send({"type": "http.response.body", "body": piece, "more_body": True})
                listener.piece(piece)
            await send({"type": "http.response.body", "body": b""})
        except httpx2.TransportError as error:  # an answer without its end breaks the connection
            logger.warning("the server behind broke off an answer: %s", type(error).__name__)
        finally:
            await response.aclose()

    def _request(self, scope: Scope, body: _Body) -> httpx2.Request:
        raw: Headers = scope["headers"]
        left_out = OF_THE_REQUEST
        headers = [(b"Host", self._host)]
        if any(name == b"transfer-encoding" for name, _ in raw):
            left_out = left_out | {b"content-length"}  # is overridden (RFC 9112, 6.3)
            headers.append((b"Transfer-Encoding", b"chunked"))
        headers += [pair for pair in _passed_on(raw) if pair[0] not in left_out]
        target = scope["raw_path"]
        if target.startswith(b"/"):  # not `*`, nor the absolute form, which stay as they are
            target = self._prefix + target
        if scope["query_string"]:
            target += b"?" + scope["query_string"]
        return httpx2.Request(
            scope["method"],
            self._origin,
            headers=headers,
            stream=body if body.exists else httpx2.ByteStream(b""),
            extensions={"target": target, "timeout": {"connect": CONNECT_TIMEOUT_S}},
        )


class _Body(httpx2.AsyncByteStream):
    """The body of a request as it comes. `exists`: False for a request without one. `broken`: the
    client left within it."""

    def __init__(self, receive: Receive, on_piece: Callable[[bytes], None], exists: bool) -> None:
        self.exists = exists
        self.broken = False
        self._receive = receive
        self._on_piece = on_piece
        self._whole = asyncio.Event()
        if not exists:
            self._whole.set()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        more = True
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self.broken = True
                raise httpx2.ReadError("the client has left")
            more = message.get("more_body", False)
            if piece := message.get("body", b""):
                self._on_piece(piece)
                yield piece
        self._whole.set()

    async def disconnected(self) -> None:
        """Returns when the client has left after its body, which is read elsewhere."""
        await self._whole.wait()
        while (await self._receive())["type"] != "http.disconnect":
            pass


def _has_body(scope: Scope) -> bool:
    return any(name in (b"content-length", b"transfer-encoding") for name, _ in scope["headers"])


def _passed_on(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """The headers that are not of one connection."""
    kept = list(headers)
    named = b",".join(value for name, value in kept if name.lower() == b"connection")
    left_out = OF_ONE_CONNECTION | {name.strip().lower() for name in named.split(b",")}
    return [(name, value) for name, value in kept if name.lower() not in left_out]


async def _send_error(send: Send, error: Exception) -> None:
    """502, where the server behind gives no answer."""
    logger.warning("the server behind gives no answer: %s", type(error).__name__)
    answer = error_json(APIError(502, "the server behind this proxy gives no answer"))
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": 502, "headers": headers})
    await send({"type": "http.response.body", "body": answer.encode()})
