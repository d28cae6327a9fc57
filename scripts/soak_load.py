"""The requests that soak_server.py sends to a server, and totals of its answers."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from inference.http_client import RequestFailed, ServerClient
from scripts.demo_target.corpus import prompts

POOL = 24  # different requests of each kind
CHOICES = ["one", "two", "three"]
COUNTED = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")  # names of the server's counters
OF_ANSWERS = dict(zip(COUNTED, ("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens"), strict=True))
FAULTS: tuple[tuple[dict[str, Any], int], ...] = (
    ({"prompt": ""}, 400),
    ({"prompt": "x", "temperature": -1}, 400),
    ({"prompt": "x", "no_such_field": 1}, 400),
    ({"prompt": "x" * 100_000}, 400),
    ({"prompt": "x", "model": "nobody"}, 404),
    ({"prompt": "x", "structured_outputs": {"regex": "("}}, 400),
)


@dataclass(frozen=True)
class Ask:
    """One request.

    status     expected of the answer
    same       requests with an equal value must get equal texts
    hangs_up   after so many events of a stream, or seconds of a whole answer, the client closes the connection
    """

    path: str
    body: dict[str, Any]
    status: int = 200
    same: str | None = None
    hangs_up: float | None = None


@dataclass
class Tally:
    """Totals of the answers. Tokens of a prompt count once per response, as the server counts them."""

    complete: int = 0
    refused: int = 0
    hung_up: int = 0
    hung_up_responses: int = 0
    hung_up_tokens: int = 0  # the most that they may have written
    reasons: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    generation_tokens: int = 0
    drafting: Counter[str] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)

    def read(self, ask: Ask, answer: dict[str, Any]) -> None:
        """A whole answer, or the parts of a stream put together."""
        n = ask.body.get("n", 1)
        self.complete += 1
        self.reasons.update(answer["reasons"])
        self.prompt_tokens += n * answer["usage"]["prompt_tokens"]
        self.generation_tokens += answer["usage"]["completion_tokens"]
        drafting = (answer.get("metrics") or {}).get("speculative_decoding") or {}
        self.drafting.update({name: drafting.get(theirs, 0) for name, theirs in OF_ANSWERS.items()})


# --------------------------------------------------------------------------------------------------- requests


def greedy_asks() -> list[Ask]:
    """Greedy requests, whose answers are known from the offline runtime."""
    asks = []
    for i, (messages, _) in enumerate(prompts("test", POOL, 1)):
        body: dict[str, Any] = {"temperature": 0, "max_tokens": 8 + 5 * (i % 12)}
        if i % 4 == 1:
            body["stop"] = ["\n", "ing "]
        if i % 6 == 2:
            body["structured_outputs"] = {"choice": CHOICES}
        if i % 3:
            asks.append(Ask("/v1/chat/completions", {"messages": list(messages), **body}, same=f"greedy {i}"))
        else:
            asks.append(Ask("/v1/completions", {"prompt": messages[-1]["content"], **body}, same=f"greedy {i}"))
    return asks


def sampled_asks() -> list[Ask]:
    """Sampled requests, each with a seed, so that its answer is the same every time."""
    asks = []
    for i, (messages, _) in enumerate(prompts("test", POOL, 2)):
        body = {"prompt": messages[-1]["content"], "seed": i, "temperature": 0.7 + 0.1 * (i % 5), "n": 1 + i % 3}
        body |= {"max_tokens": 8 + 4 * (i % 9), "top_p": 0.9, "frequency_penalty": 0.2 * (i % 2)}
        asks.append(Ask("/v1/completions", body, same=f"sampled {i}"))
    return asks


def drawn(rng: random.Random, pools: tuple[list[Ask], list[Ask]], *, exact: bool) -> Ask:
    """The next request of a client. Where counts are exact, several responses to one prompt are written without
    drafts, since answers report drafting for single ones only."""
    chance = rng.random()
    if chance < 0.06:
        body, status = rng.choice(FAULTS)
        return Ask("/v1/completions", body, status)
    ask = rng.choice(pools[chance < 0.4])
    body = dict(ask.body)
    if body.get("n", 1) == 1:
        body["per_request_spec_decode_metrics"] = "summary"
    same = ask.same
    if rng.random() < 0.15 or (exact and body.get("n", 1) > 1):
        body["num_speculative_tokens"] = 0
        same = same if body["temperature"] == 0 else f"{same} undrafted"
    if rng.random() < 0.5:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    if not exact and rng.random() < 0.1:
        return Ask(ask.path, body, same=same, hangs_up=rng.randint(1, 6) if body.get("stream") else 0.2 * rng.random())
    return Ask(ask.path, body, same=same)


# --------------------------------------------------------------------------------------------------- clients


class Load:
    """The clients. `texts`: the expected texts by `Ask.same`; the first answer sets those of other requests."""

    def __init__(self, url: str, texts: dict[str, list[str]], *, seeded: bool) -> None:
        self.client, self.texts, self._seeded = ServerClient(url, 300.0), texts, seeded
        self.compared = 0

    async def saturate(self, tally: Tally, seconds: float, clients: int, seed: int, *, exact: bool) -> None:
        pools, end = (greedy_asks(), sampled_asks()), time.monotonic() + seconds

        async def run_client(number: int) -> None:
            rng = random.Random(f"{seed} {number} {exact}")
            while time.monotonic() < end:
                await self._ask(drawn(rng, pools, exact=exact), tally)

        await asyncio.gather(*(run_client(number) for number in range(clients)))

    async def _ask(self, ask: Ask, tally: Tally) -> None:
        parts = list[dict[str, Any]]()
        try:
            if ask.body.get("stream"):
                async with aclosing(self.client.events(ask.path, ask.body)) as events:
                    async for event in events:
                        parts.append(event)
                        if ask.hangs_up is not None and len(parts) >= ask.hangs_up:
                            return _hung_up(ask, tally)
            else:
                async with asyncio.timeout(ask.hangs_up):
                    parts = [await self.client.post(ask.path, ask.body)]
        except TimeoutError:
            return _hung_up(ask, tally)
        except RequestFailed as failure:
            if failure.reason != f"http_{ask.status}":
                tally.lost.append(str(failure)[:200])
            elif ask.status != 200:
                tally.refused += 1
            return None
        if ask.status != 200:
            tally.lost.append(f"HTTP 200 instead of {ask.status}")
            return None
        answer = _joined(parts)
        if ask.body.get("stream") and len(answer["reasons"]) < ask.body.get("n", 1):
            tally.lost.append("the stream broke off")
            return None
        tally.read(ask, answer)
        if ask.same is not None and (self._seeded or ask.same.startswith("greedy")):
            self.compared += 1
            expected = self.texts.setdefault(ask.same, answer["texts"])
            if answer["texts"] != expected:
                tally.changed.append(f"{ask.same}: {answer['texts']!r} instead of {expected!r}"[:400])
        return None


def _hung_up(ask: Ask, tally: Tally) -> None:
    n = ask.body.get("n", 1)
    tally.hung_up += 1
    tally.hung_up_responses += n
    tally.hung_up_tokens += n * ask.body["max_tokens"]


def _joined(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One answer from a whole one, or from the chunks of a stream."""
    answer: dict[str, Any] = {"reasons": [], "usage": None, "metrics": None}
    texts: dict[int, str] = {}
    for part in parts:
        answer["usage"] = part.get("usage") or answer["usage"]
        answer["metrics"] = part.get("metrics") or answer["metrics"]
        for choice in part["choices"]:
            content = choice.get("message") or choice.get("delta") or choice
            text = content.get("content") or content.get("text") or ""
            texts[choice["index"]] = texts.get(choice["index"], "") + text
            answer["reasons"] += [choice["finish_reason"]] if choice.get("finish_reason") else []
    return answer | {"texts": [texts[i] for i in sorted(texts)]}


async def idle(client: ServerClient) -> dict[str, float]:
    """The server's counters once no request runs or waits, which must be within a minute."""
    for _ in range(120):
        totals = await client.metrics()
        if totals["num_requests_running"] == totals["num_requests_waiting"] == 0:
            return totals
        await asyncio.sleep(0.5)
    raise TimeoutError("a minute after the last client left, requests still run or wait")
