"""What writes responses: the protocol, and the LLM of this process."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from draftsmith.inference import LLM
from draftsmith.inference.entrypoints.prompts import Prompt
from draftsmith.inference.requests.request import Request
from draftsmith.inference.requests.response import Response
from draftsmith.train.regeneration.conversations import Ask
from draftsmith.version import package_version

REPORT_EVERY_S = 10.0  # while no response ends


@dataclass(frozen=True)
class Written:
    """A response that `engine` has written, or refused for a reason (`token_ids` is None then)."""

    ask: Ask
    token_ids: tuple[int, ...] | None
    engine: str = ""
    reason: str = ""


class Writer(Protocol):
    """Writes responses, many at a time."""

    capacity: int  # responses under way that keep it busy

    @property
    def tokens_under_way(self) -> int:
        """Tokens of the responses that have not ended, as far as they are known here."""

    def begin(self, ask: Ask) -> None:
        """Begins a response."""

    def collect(self) -> list[Written]:
        """Writes until a response ends, REPORT_EVERY_S at most; returns those that have."""

    def close(self) -> None:
        """Gives up the responses under way."""


class UnreadStates(Protocol):
    """Hidden states that servers leave of responses, which nobody reads."""

    def request_name(self) -> str:
        """A name for the next request, by which its files are known."""

    def discard(self, params: dict[str, Any]) -> None:
        """Removes the states of a request by the kv_transfer_params of its answer."""

    def remove_left_over(self) -> None:
        """Removes those of requests that had no answer."""


@dataclass(frozen=True)
class Begun:
    """A response that the engine of this process writes; one request, as an ask is one prompt."""

    ask: Ask
    response: Response

    @property
    def request(self) -> Request:
        """The engine's account of it."""
        return self.response.requests[0]

    def written(self, engine: str) -> Written:
        """What became of it, once its request has ended."""
        return Written(self.ask, tuple(self.response.output().outputs[0].token_ids), engine)


class LocalWriter:
    """The LLM of this process, which `make_llm` gives once there is something to write."""

    def __init__(self, make_llm: Callable[[], LLM], capacity: int) -> None:
        self.capacity = capacity
        self._make_llm = make_llm
        self._under_way: dict[int, Begun] = {}  # by the request's identity

    @cached_property
    def llm(self) -> LLM:
        """The target, loaded at the first response."""
        return self._make_llm()

    @property
    def tokens_under_way(self) -> int:
        """Tokens of responses that have begun and not ended."""
        requests = [begun.request for begun in self._under_way.values()]
        return sum(len(request.token_ids) - request.num_prompt_tokens for request in requests)

    def begin(self, ask: Ask) -> None:
        """Submits the prompt of a response to the engine."""
        begun = Begun(ask, self.llm.submit(Prompt(None, list(ask.prompt_ids)), ask.params))
        self._under_way[id(begun.request)] = begun

    def collect(self) -> list[Written]:
        """Runs rounds until a response has ended, or for REPORT_EVERY_S seconds; what has ended."""
        until = time.monotonic() + REPORT_EVERY_S
        while not (requests := self.llm.engine.step()) and time.monotonic() < until:
            pass
        dtype = str(self.llm.engine.target.dtype).removeprefix("torch.")
        engine = f"draftsmith {package_version()}, {dtype}"
        return [self._under_way.pop(id(request)).written(engine) for request in requests]

    def close(self) -> None:
        """Aborts what is under way."""
        for begun in self._under_way.values():
            self.llm.abort(begun.response.request_id)
        self._under_way.clear()
