"""What a client is told when something is wrong: OpenAI's shape, vLLM's types, and the name of the field.

    {"error": {"message": …, "type": …, "param": …, "code": …}}

Knows HTTP and pydantic's errors; nothing of models. What a server did wrong is logged without its message, which may
hold what the client sent.
"""

from __future__ import annotations

import json
import logging
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException

logger = logging.getLogger(__name__)

TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "TimeoutError",
    413: "RequestTooLargeError",
    429: "RateLimitError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}
MOST_FAULTS = 3  # told at a time; a union of types has one for each


class APIError(HTTPException):
    """`param`: the field of the request that is wrong."""

    def __init__(
        self, status: int, message: str, param: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(status, message, dict(headers) if headers else None)
        self.param = param


def error_json(error: HTTPException) -> bytes:
    kind = TYPES.get(error.status_code, "BadRequestError" if error.status_code < 500 else "InternalServerError")
    param = getattr(error, "param", None)
    body = {"error": {"message": str(error.detail), "type": kind, "param": param, "code": error.status_code}}
    return json.dumps(body, ensure_ascii=False).encode("utf-8", "replace")  # what was sent need not be Unicode


def error_response(error: HTTPException) -> Response:
    return Response(error_json(error), error.status_code, error.headers, "application/json")


def log_fault(where: str, error: BaseException) -> None:
    """A fault of the server's own: its type and where it happened. The message stays out: it may quote a prompt."""
    frames = "".join(traceback.format_tb(error.__traceback__))
    logger.error("%s: %s\n%s", where, type(error).__name__, frames.rstrip())


def install(app: FastAPI) -> None:
    """Every error of the app in this shape."""
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _validation_error)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return error_response(error)


async def _validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    if isinstance(error.body, bytes) and error.body:  # not read at all
        return error_response(APIError(400, "the body is not read: send JSON, with Content-Type: application/json"))
    faults = error.errors()
    texts = [f"{where}: {fault['msg']}" if (where := _where(fault, error.body)) else fault["msg"] for fault in faults]
    told = list(dict.fromkeys(text.replace("Value error, ", "") for text in texts))[:MOST_FAULTS]
    return error_response(APIError(400, "; ".join(told), _where(faults[0], error.body) or None))


def _where(fault: Mapping[str, Any], body: Any) -> str:
    """messages[0].content: pydantic's location without the names of types that it puts between."""
    location: Sequence[str | int] = fault["loc"][1:]
    path, here = "", body
    for i, part in enumerate(location):
        known = part in here if isinstance(here, dict) else isinstance(here, list) and isinstance(part, int)
        if known:
            here = here[part]
        elif not (fault["type"] == "missing" and i == len(location) - 1):
            continue
        path += f"[{part}]" if isinstance(part, int) else f".{part}"
    return path.removeprefix(".")
