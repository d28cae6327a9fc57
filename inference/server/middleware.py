"""What a request meets first: its key, its size, and a net under everything that follows. Plain ASGI; knows no routes
but those that are open to all."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import math
from collections.abc import Collection, Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from inference.server.api.errors import APIError, error_response, log_fault

OPEN_PATHS = ("/", "/health")  # the page holds nothing; what it asks for needs the key


class Gate:
    """api_keys        any of them opens the server, as `Authorization: Bearer KEY`; none: it is open
    max_body_bytes     longest body that is read
    body_timeout_s     until all of it has come
    open_paths         need no key"""

    def __init__(
        self,
        app: ASGIApp,
        api_keys: Sequence[str] = (),
        max_body_bytes: int = 1 << 22,
        body_timeout_s: float = math.inf,
        open_paths: Collection[str] = OPEN_PATHS,
    ) -> None:
        self._app, self._limit, self._open_paths = app, max_body_bytes, frozenset(open_paths)
        self._patience = body_timeout_s
        self._digests = [_digest(key.encode()) for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = False

        async def watched(message: Message) -> None:
            nonlocal began
            began = began or message["type"] == "http.response.start"
            await send(message)

        try:
            self._require_key(scope)
            await self._app(scope, self._counted(scope, receive), watched)
        except APIError as error:
            await error_response(error)(scope, receive, send)
        except Exception as error:
            log_fault(f"{scope['method']} {scope['path']}", error)
            if not began:
                fault = APIError(500, "the server failed to answer this request; its log says where")
                await error_response(fault)(scope, receive, send)

    def _require_key(self, scope: Scope) -> None:
        if not self._digests or scope["path"] in self._open_paths:
            return
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, key = given.partition(b" ")
        digest = _digest(key.strip())
        matches = [hmac.compare_digest(digest, each) for each in self._digests]  # all of them, whichever it is
        if scheme.lower() != b"bearer" or not any(matches):
            raise APIError(
                401, "no valid API key; send one as `Authorization: Bearer KEY`", headers={"WWW-Authenticate": "Bearer"}
            )

    def _counted(self, scope: Scope, receive: Receive) -> Receive:
        """`receive`, up to the limits. What a client announces is believed if it is too much."""
        too_large = APIError(413, f"the body is longer than {self._limit} bytes", headers={"Connection": "close"})
        announced = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        if announced.isdigit() and int(announced) > self._limit:
            raise too_large
        read, whole = 0, False
        end = None if math.isinf(self._patience) else asyncio.get_running_loop().time() + self._patience

        async def counted() -> Message:
            nonlocal read, whole
            try:
                async with asyncio.timeout_at(None if whole else end):  # then only the client's leaving is waited for
                    message = await receive()
            except TimeoutError:
                late = f"the body had not come after {self._patience:g} s, the server's limit"
                raise APIError(408, late, headers={"Connection": "close"}) from None
            read, whole = read + len(message.get("body", b"")), not message.get("more_body", False)
            if read > self._limit:
                raise too_large
            return message

        return counted


def _digest(key: bytes) -> bytes:
    """Of equal length for all keys, so that comparing tells nothing about them."""
    return hashlib.sha256(key).digest()
