"""Errors as clients receive them: OpenAI's shape, the status as their type, the name of the field.

{"error": {"message": …, "type": …, "param": …, "code": …}}
"""

from __future__ import annotations

import json
from http import HTTPStatus

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from draftsmith.speculators.errors import DraftsmithError


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
    words = HTTPStatus(error.status_code).phrase.title().removesuffix(" Error")
    body = {
        "message": str(error.detail),
        "type": words.replace(" ", "") + "Error",  # BadRequestError
        "param": getattr(error, "param", None),
        "code": error.status_code,
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
