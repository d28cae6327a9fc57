"""Errors as clients receive them: OpenAI's shape, vLLM's types, and the name of the field.

    {"error": {"message": …, "type": …, "param": …, "code": …}}

Errors of the server itself are logged without their message, which may quote what the client sent.
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
MAX_VALIDATION_ERRORS = 3  # in one message; a union of types has one for each member


class APIError(HTTPException):
    """An HTTP error. `param`: the field of the request that is wrong."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, headers)
        self.param = param


def error_json(error: HTTPException) -> bytes:
    kind = TYPES.get(
        error.status_code, "BadRequestError" if error.status_code < 500 else "InternalServerError"
    )
    param = getattr(error, "param", None)
    body = {
        "error": {
            "message": str(error.detail),
            "type": kind,
            "param": param,
            "code": error.status_code,
        }
    }
    return json.dumps(body, ensure_ascii=False).encode(
        "utf-8", "replace"
    )  # requests need not be Unicode


def error_response(error: HTTPException) -> Response:
    return Response(error_json(error), error.status_code, error.headers, "application/json")


def log_fault(where: str, error: BaseException) -> None:
    """Logs the type and the place of an internal error, without its message."""
    frames = "".join(traceback.format_tb(error.__traceback__))
    logger.error("%s: %s\n%s", where, type(error).__name__, frames.rstrip())


def add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        return error_response(error)

    @app.exception_handler(RequestValidationError)
    async def validation_error(request: Request, error: RequestValidationError) -> Response:
        if isinstance(error.body, bytes) and error.body:  # it was not parsed
            return error_response(
                APIError(
                    400, "the body is not read: send JSON, with Content-Type: application/json"
                )
            )
        faults = _of_the_type_that_was_sent(error.errors())
        messages, params = [], [_param(fault, error.body) for fault in faults]
        for fault, param in zip(faults, params):
            message = fault["msg"].removeprefix("Value error, ")
            messages.append(f"{param}: {message}" if param else message)
        text = "; ".join(list(dict.fromkeys(messages))[:MAX_VALIDATION_ERRORS])
        return error_response(APIError(400, text, params[0] or None))


def _of_the_type_that_was_sent(faults: Sequence[Any]) -> list[Any]:
    """Without the faults of a union's other types, where one type fits and its value does not."""
    fitting = {f["loc"][1:2] for f in faults if not f["type"].endswith("_type")}
    return [f for f in faults if not f["type"].endswith("_type") or f["loc"][1:2] not in fitting]


def _param(fault: Mapping[str, Any], body: Any) -> str:
    """The path of a field, such as messages[0].content: pydantic's location without the type names
    of unions."""
    location = fault["loc"][1:]
    path, value = "", body
    for i, part in enumerate(location):
        if (
            part in value
            if isinstance(value, dict)
            else isinstance(value, list) and isinstance(part, int)
        ):
            value = value[part]
        elif not (fault["type"] == "missing" and i == len(location) - 1):
            continue
        path += f"[{part}]" if isinstance(part, int) else f".{part}"
    return path.removeprefix(".")
