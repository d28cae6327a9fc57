"""Errors as clients receive them: OpenAI's shape, vLLM's types, and the name of the field.

{"error": {"message": …, "type": …, "param": …, "code": …}}
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException

TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    429: "RateLimitError",
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
    other = "BadRequestError" if error.status_code < 500 else "InternalServerError"
    body = {
        "message": str(error.detail),
        "type": TYPES.get(error.status_code, other),
        "param": getattr(error, "param", None),
        "code": error.status_code,
    }
    # what a request quotes need not be Unicode
    return json.dumps({"error": body}, ensure_ascii=False).encode("utf-8", "replace")


def error_response(error: HTTPException) -> Response:
    return Response(error_json(error), error.status_code, error.headers, "application/json")


def add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        return error_response(error)

    @app.exception_handler(Exception)
    async def fault(request: Request, error: Exception) -> Response:
        return error_response(APIError(500, f"the server failed: {type(error).__name__}: {error}"))

    @app.exception_handler(RequestValidationError)
    async def validation_error(request: Request, error: RequestValidationError) -> Response:
        if isinstance(error.body, bytes) and error.body:  # it was not parsed
            message = "the body is not read: send JSON, with Content-Type: application/json"
            return error_response(APIError(400, message))
        faults = _of_the_type_that_was_sent(error.errors())
        params = [_param(fault, error.body) for fault in faults]
        messages = [
            f"{param}: {fault['msg']}" if param else fault["msg"].removeprefix("Value error, ")
            for param, fault in zip(params, faults, strict=True)
        ]
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
    path = ""
    value = body
    for i, part in enumerate(location):
        indexed = isinstance(value, list) and isinstance(part, int)
        if indexed or (isinstance(value, dict) and part in value):
            value = value[part]
        elif not (fault["type"] == "missing" and i == len(location) - 1):
            continue
        path += f"[{part}]" if isinstance(part, int) else f".{part}"
    return path.removeprefix(".")
