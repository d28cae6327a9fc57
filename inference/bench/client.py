"""One request to a server and its stream, timed; and what the server says of itself: its model, its counters.

Tokens are counted by the server (`usage`): a piece of the stream may hold several, as drafting makes them, or none.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx2
from prometheus_client.parser import text_string_to_metric_families

from inference.metrics import SpecDecodeCounters
from speculators.errors import DraftsmithError

COUNTERS = "vllm:spec_decode_num_"
LOOK_S = 30.0  # what a server gets to say who it is, and its counters
WRITTEN = ("content", "reasoning_content", "reasoning", "tool_calls")  # what a chat's delta may bring


@dataclass(frozen=True)
class Outcome:
    """What became of a request. Seconds throughout; `start_time` on this process's clock.

    ttft          from sending it to the first piece of the answer
    itl           between one piece and the next, which is a token's time only where pieces are single tokens
    latency       to the last piece
    queue_time    waited here for its turn before it was sent
    output_tokens, prompt_len as the server counted them
    """

    success: bool = False
    error: str = ""
    start_time: float = 0.0
    queue_time: float = 0.0
    ttft: float = 0.0
    latency: float = 0.0
    itl: tuple[float, ...] = ()
    prompt_len: int = 0
    output_tokens: int = 0
    text: str = ""


@dataclass
class _Answer:
    """A stream as far as it was read."""

    start: float
    times: list[float] = field(default_factory=list)
    end: float = 0.0
    text: str = ""
    finished: bool = False
    usage: dict[str, Any] | None = None

    def read(self, event: dict[str, Any], now: float) -> None:
        if event.get("error"):
            raise _Broken(f"the server ended the stream: {_told(event)}")
        self.usage = event.get("usage") or self.usage
        for choice in event.get("choices") or ():
            piece, text = _piece(choice)
            if piece:
                self.times.append(now)
                self.text += text
            if piece or choice.get("finish_reason"):
                self.end = now
            self.finished = self.finished or bool(choice.get("finish_reason"))


class _Broken(Exception):
    """A stream that is no answer."""


def _piece(choice: dict[str, Any]) -> tuple[bool, str]:
    """Whether a choice brings something written, and its text. An empty text is one, of a token whose text is held
    back; the opening of a chat, which names the role, and an end without text are none."""
    delta = choice.get("delta")
    if delta is None:
        text = choice.get("text")
        return text is not None, text or ""
    text = delta.get("content")
    if any(delta.get(name) for name in WRITTEN):
        return True, text if isinstance(text, str) else ""
    return text is not None and not delta.get("role"), ""


def _told(answer: Any) -> str:
    error = answer.get("error", answer) if isinstance(answer, dict) else answer
    message = error.get("message", error) if isinstance(error, dict) else error
    return str(message)[:500]


def make_client(headers: dict[str, str], timeout_s: float, *, insecure: bool = False) -> httpx2.AsyncClient:
    """A client without a limit of connections: the load has its own. `timeout_s`: of silence."""
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx2.AsyncClient(headers=headers, timeout=timeout_s, limits=limits, verify=not insecure)


async def ask(
    client: httpx2.AsyncClient, url: str, body: dict[str, Any], timeout_s: float,
    count_tokens: Callable[[str], int] | None,
) -> Outcome:  # fmt: skip
    """Sends a request whose answer is streamed, and reads it to its end. Never raises for what the server or the
    network does: that is an outcome without success. `count_tokens`: for servers that report no usage."""
    answer = _Answer(time.perf_counter())
    try:
        async with asyncio.timeout(timeout_s), client.stream("POST", url, json=body) as response:
            if response.status_code != 200:
                await response.aread()
                raise _Broken(f"HTTP {response.status_code}: {_told(_json(response.text))}")
            async for event in _events(response):
                answer.read(event, time.perf_counter())
        return _outcome(answer, count_tokens)
    except (_Broken, httpx2.HTTPError, TimeoutError) as error:
        why = str(error) or f"{type(error).__name__} after {time.perf_counter() - answer.start:.1f} s"
        return Outcome(error=why, start_time=answer.start, latency=time.perf_counter() - answer.start)


async def _events(response: httpx2.Response) -> AsyncIterator[dict[str, Any]]:
    async for line in response.aiter_lines():
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        event = _json(data)
        if not isinstance(event, dict):
            raise _Broken(f"an event of the stream is no JSON object: {data[:80]}")
        yield event


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _outcome(answer: _Answer, count_tokens: Callable[[str], int] | None) -> Outcome:
    if not answer.times:
        raise _Broken("the stream ended without a token")
    if not answer.finished:
        raise _Broken("the stream broke off: no choice gave a finish_reason")
    usage = answer.usage or {}
    tokens = usage.get("completion_tokens")
    if tokens is None and count_tokens is not None:
        tokens = count_tokens(answer.text)
    if tokens is None:
        raise _Broken("the server reports no usage for streams; name its tokenizer with --tokenizer to count tokens")
    return Outcome(
        success=True,
        start_time=answer.start,
        ttft=answer.times[0] - answer.start,
        latency=answer.end - answer.start,
        itl=tuple(b - a for a, b in zip(answer.times, answer.times[1:], strict=False)),
        prompt_len=usage.get("prompt_tokens") or 0,
        output_tokens=tokens,
        text=answer.text,
    )


async def served_model(client: httpx2.AsyncClient, base_url: str) -> tuple[str, str]:
    """(name, where it came from) of the first model of `/v1/models`. DraftsmithError if the server does not say."""
    url = f"{base_url}/v1/models"
    try:
        response = await client.get(url, timeout=LOOK_S)
    except httpx2.HTTPError as error:
        raise DraftsmithError(f"{url}: no server answers: {error or type(error).__name__}; start it, or mend "
                              "--base-url, --host and --port") from error  # fmt: skip
    listed = _json(response.text)
    if response.status_code != 200 or not isinstance(listed, dict) or not listed.get("data"):
        raise DraftsmithError(f"{url}: HTTP {response.status_code}: {_told(listed)}; expected a list of models. Give "
                              "--model if the server has no such page")  # fmt: skip
    first = listed["data"][0]
    return first["id"], first.get("root") or first["id"]


async def context_length(client: httpx2.AsyncClient, base_url: str, name: str) -> int | None:
    """What `/v1/models` says of the longest prompt and response of a model; None if it does not say."""
    try:
        listed = _json((await client.get(f"{base_url}/v1/models", timeout=LOOK_S)).text)
    except httpx2.HTTPError:
        return None
    models = listed.get("data") if isinstance(listed, dict) else None
    found = next((each for each in models or () if isinstance(each, dict) and each.get("id") == name), {})
    limit = found.get("max_model_len")
    return limit if isinstance(limit, int) else None


async def drafting_counters(client: httpx2.AsyncClient, base_url: str) -> SpecDecodeCounters | None:
    """What the server's `/metrics` says of drafting, under vLLM's names; summed over engines and models. None: it has
    no such page, or does not draft."""
    try:
        response = await client.get(f"{base_url}/metrics", timeout=LOOK_S)
        families = list(text_string_to_metric_families(response.text)) if response.status_code == 200 else []
    except (httpx2.HTTPError, ValueError):
        return None
    totals: dict[str, int] = {}
    per_position: dict[int, int] = {}
    for sample in (sample for family in families for sample in family.samples):
        if not (sample.name.startswith(COUNTERS) and sample.name.endswith("_total")):
            continue
        name = sample.name.removeprefix(COUNTERS).removesuffix("_total")
        if name == "accepted_tokens_per_pos":
            place = int(sample.labels["position"])
            per_position[place] = per_position.get(place, 0) + int(sample.value)
        else:
            totals[name] = totals.get(name, 0) + int(sample.value)
    if not totals:
        return None
    places = [per_position.get(i, 0) for i in range(max(per_position, default=-1) + 1)]
    return SpecDecodeCounters(
        totals.get("drafts", 0), totals.get("draft_tokens", 0), totals.get("accepted_tokens", 0), places
    )
