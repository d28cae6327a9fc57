"""What a log holds: a record a line, in JSON. Imports no torch."""

from __future__ import annotations

import random
from dataclasses import field
from typing import Annotated, Any, Literal, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from draftsmith.inference.metrics import SpecDecodeCounters
from draftsmith.speculators.errors import DataError

STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

TokenIds = list[Annotated[int, Field(ge=0)]]
Record = TypeVar("Record")


@dataclass(frozen=True, config=STRICT)
class LogHeader:
    """The first line of a file: the slice of time that it is of.

    kind       what the other lines are
    start      of the slice, in seconds since 1970
    seconds    its length
    most       exchanges that are kept of the slice, those with the smallest keys: one file may
               hold more, and so may several of the same slice. None: all
    version    of the format
    """

    kind: Literal["exchanges", "counters"]
    start: int
    seconds: Annotated[int, Field(ge=1)]
    most: Annotated[int, Field(ge=1)] | None = None
    version: Literal[1] = 1


@dataclass(frozen=True, config=STRICT)
class LoggedExchange:
    """One response to one prompt. A request with several of either is as many exchanges.

    time                  of the request's arrival, in seconds since 1970
    model                 as the server names it
    messages              of a chat, as sent; None for a completion
    chat_template_kwargs  what else the chat template was given, with `tools` among it
    prompt                of a completion, as sent; None for a chat, and for token ids
    prompt_token_ids      the prompt as the target read it; None where the server did not say
    text                  as the target wrote it, without the token that ended it. None where the
                          server did not say, and where it took tool calls or reasoning apart
    token_ids             as the target wrote them, with the one that ended them; None where the
                          server did not say
    finish_reason         as in `CompletionOutput`; None if the client left before the end
    sampling              the sampling parameters that the request named, under vLLM's names
    spec_decode           what became of the drafts of this response, where the server said
    key                   drawn from [0, 1); the smallest of a slice are its sample
    """

    time: float
    model: str
    messages: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    prompt: str | None = None
    prompt_token_ids: TokenIds | None = None
    text: str | None = None
    token_ids: TokenIds | None = None
    finish_reason: str | None = None
    sampling: dict[str, Any] = field(default_factory=dict)
    spec_decode: SpecDecodeCounters | None = None
    key: Annotated[float, Field(ge=0, lt=1)] = field(default_factory=random.random, compare=False)


@dataclass(frozen=True, config=STRICT)
class LoggedCounters:
    """What a server's counters grew by in the `seconds` before `time` (in seconds since 1970): over
    all of its traffic, logged or not."""

    time: float
    seconds: Annotated[float, Field(gt=0)]
    spec_decode: SpecDecodeCounters


_ADAPTERS: dict[Any, TypeAdapter[Any]] = {
    record: TypeAdapter(record) for record in (LogHeader, LoggedExchange, LoggedCounters)
}


def to_line(record: LogHeader | LoggedExchange | LoggedCounters) -> bytes:
    """A record as a line of a log, with its end."""
    return _ADAPTERS[type(record)].dump_json(record) + b"\n"


def from_line(record: type[Record], line: bytes, where: str) -> Record:
    """The record in a line. DataError, with `where`, for one that is no such record."""
    try:
        return _ADAPTERS[record].validate_json(line)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False)[0]
    place = ".".join(map(str, fault["loc"]))
    message = f"{place}: {fault['msg']}" if place else fault["msg"]
    raise DataError(
        f"is no {record.__name__} ({message}); remove the line, or the file", where=where
    )
