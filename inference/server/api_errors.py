"""Errors as clients receive them: OpenAI's shape, vLLM's types, the name of the field.

{"error": {"message": …, "type": …, "param": …, "code": …}}
"""

from __future__ import annotations

import json
from http import HTTPStatus

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from draftsmith.speculators.errors import DraftsmithError

# Status -> type and code: vLLM's for what vLLM answers in this shape, else what OpenAI's API sends.
TYPES: dict[int, tuple[str, int | str | None]] = {
    400: ("BadRequestError", 400),
    401: ("invalid_request_error", "invalid_api_key"),
    404: ("NotFoundError", 404),
    429: ("requests", "rate_limit_exceeded"),
    500: ("InternalServerError", 500),
    503: ("server_error", None),
}
SHUTTING_DOWN = "the server is shutting down"


class APIError(HTTPException):
    """An HTTP error. `param`: the field of the request that is wrong."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, headers)
        self.param = param


def error_json(error: HTTPException) -> str:
    """The body of the answer to a request that failed."""
    status = error.status_code
    kind, code = TYPES.get(status, (HTTPStatus(status).phrase, status))
    body = {
        "message": str(error.detail),
        "type": kind,
        "param": getattr(error, "param", None),
        "code": code,
    }
    return json.dumps({"error": body})


async def error_response(http: Request, error: Exception) -> Response:
    """The answer to a request that ended with an exception, of whatever kind."""
    error = fault(error)
    return Response(error_json(error), error.status_code, error.headers, "application/json")


def fault(error: BaseException) -> HTTPException:
    """An exception as an answer: what is wrong with the request as 400, what failed here with its
    reason as 500."""
    if isinstance(error, HTTPException):
        return error
    if isinstance(error, DraftsmithError):
        return APIError(400, str(error))
    return APIError(500, f"the server failed: {reason(error)}")


def reason(error: BaseException) -> str:
    """The class of an exception, and the first line of its message."""
    line = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {line}"
