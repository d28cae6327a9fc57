"""ASGI middleware before the routes: API keys, limits of request bodies, and the answer to
unexpected errors.

Starlette's own body limit and error handler answer in plain text and log messages, which may quote
a prompt."""

from __future__ import annotations

import asyncio
import hashlib
import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from inference.server.api.errors import APIError, error_response, log_fault
from inference.server.options import ServerOptions

OPEN_PATHS = ("/", "/health")  # need no key; the page at / holds no data


class RequestGuard:
    """Any of `api_key` opens the server, as `Authorization: Bearer KEY`; without one it is open.
    The whole body must have arrived within `request_timeout_s`."""

    def __init__(self, app: ASGIApp, options: ServerOptions) -> None:
        self._app, self._max_body_bytes, self._body_timeout_s = (
            app,
            options.max_body_bytes,
            options.request_timeout_s,
        )
        self._digests = [_digest(key.encode()) for key in options.api_key]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        started = False

        async def send_and_note(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            headers = Headers(scope=scope)
            if scope["path"] not in OPEN_PATHS:
                self._require_key(headers)
            await self._app(scope, self._limited(headers, receive), send_and_note)
        except APIError as error:
            await error_response(error)(scope, receive, send)
        except Exception as error:
            log_fault(f"{scope['method']} {scope['path']}", error)
            if not started:
                fault = APIError(
                    500, "the server failed to answer this request; its log says where"
                )
                await error_response(fault)(scope, receive, send)

    def _require_key(self, headers: Headers) -> None:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        digest = _digest(key.strip().encode("latin-1"))
        matches = [
            hmac.compare_digest(digest, known) for known in self._digests
        ]  # all, for equal time
        if matches and not (scheme.lower() == "bearer" and any(matches)):
            message = "no valid API key; send one as `Authorization: Bearer KEY`"
            raise APIError(401, message, headers={"WWW-Authenticate": "Bearer"})

    def _limited(self, headers: Headers, receive: Receive) -> Receive:
        """Wraps `receive` with both limits. An announced length that is too large is refused
        unread."""
        limit, timeout = self._max_body_bytes, self._body_timeout_s
        too_large = APIError(
            413, f"the body is longer than {limit} bytes", headers={"Connection": "close"}
        )
        announced = headers.get("content-length", "0")
        if announced.isdecimal() and int(announced) > limit:
            raise too_large
        size, complete = 0, False
        deadline = asyncio.get_running_loop().time() + timeout

        async def limited() -> Message:
            nonlocal size, complete
            try:
                async with asyncio.timeout_at(
                    None if complete else deadline
                ):  # after the body only a disconnect comes
                    message = await receive()
            except TimeoutError:
                late = f"the body had not come after {timeout:g} s, the server's limit"
                raise APIError(408, late, headers={"Connection": "close"}) from None
            size, complete = (
                size + len(message.get("body", b"")),
                not message.get("more_body", False),
            )
            if size > limit:
                raise too_large
            return message

        return limited


def _digest(key: bytes) -> bytes:
    """Hashes a key, so that all have the same length and comparing takes the same time."""
    return hashlib.sha256(key).digest()
