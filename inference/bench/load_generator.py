"""One measurement of a server: requests arrive, their streams are timed, and the result has the
names of vLLM's `bench serve`.

The server counts the tokens (`usage`): with drafting, a piece of a stream may hold several. Failed
requests are counted and enter no result. A result without values is None, never 0."""

from __future__ import annotations

import asyncio
import json
import math
import os
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx2
import numpy as np
import openai
from pydantic import BaseModel
from rich.console import Console

from draftsmith.inference.bench.bench_options import BenchOptions
from draftsmith.inference.bench.datasets import Question, load_questions
from draftsmith.inference.metrics import SpecDecodeCounters
from draftsmith.inference.progress import Advance, Stages
from draftsmith.inference.server_counters import read_counters
from draftsmith.speculators.errors import ConfigError, DraftsmithError

KEY = "OPENAI_API_KEY"
TIMEOUT_S = 3600.0  # without a piece of an answer, after which its request has failed
DETAILS = ("generated_texts", "errors")  # fields with an entry for every request


@dataclass
class Outcome:
    """The result of one request. Times are in seconds; waiting for a free slot is in none.

    ttft          from sending to the first piece of the answer
    itl           between consecutive pieces; a piece may hold several tokens
    latency       from sending to the last piece
    """

    error: str = ""
    ttft: float = 0.0
    latency: float = 0.0
    itl: tuple[float, ...] = ()
    prompt_len: int = 0
    output_tokens: int = 0
    text: str = ""


def prepare(options: BenchOptions) -> list[Question]:
    """The requests of one command, made once: servers that are compared get the same."""
    tokenizer = None
    if options.random:
        from draftsmith.inference.entrypoints.loading import load_tokenizer

        name = options.tokenizer or str(options.model)
        tokenizer = load_tokenizer(name, None, trust_remote_code=options.trust_remote_code)
    return load_questions(options, tokenizer)


def client_at(url: str) -> openai.AsyncOpenAI:
    """A client of the server at `url`, with or without /v1. ConfigError if it is no address."""
    try:
        address = httpx2.URL(url)
        sound = address.scheme in ("http", "https") and bool(address.host)
        sound = sound and (address.port is None or 0 < address.port < 65536)
    except httpx2.InvalidURL:
        sound = False
    if not sound:
        raise ConfigError(
            "is no address of a server; expected http:// or https://, host and port, such as"
            " http://127.0.0.1:8000",
            where=f"{url!r}",
        )
    return openai.AsyncOpenAI(
        base_url=url.rstrip("/").removesuffix("/v1") + "/v1",
        api_key=os.environ.get(KEY) or "none",
        timeout=TIMEOUT_S,
        max_retries=0,
    )


class ModelCard(BaseModel):
    """A served model: the name of requests, and what it was loaded from."""

    id: str
    root: str | None = None


class ModelList(BaseModel):
    """The answer of /v1/models."""

    data: list[ModelCard]


async def served_model(client: openai.AsyncOpenAI, model: str | None = None) -> str:
    """The name under which a model is served, None: the server's first one. DraftsmithError without
    an answer, ConfigError if it is not served."""
    where = f"{client.base_url}models"
    try:
        answer = await client.get("/models", cast_to=object)
        cards = ModelList.model_validate(answer).data
    except openai.OpenAIError as error:
        hint = "is the server running, and is this its address? Its key is read from"
        raise DraftsmithError(f"{error}; {hint} ${KEY}", where=where) from None
    except ValueError:  # no JSON, or JSON of another shape
        raise DraftsmithError(
            "the answer is no list of models; is this the address of a server with OpenAI's API?",
            where=where,
        ) from None
    if not cards:
        raise ConfigError("the server has no model; start it with one", where=where)
    for card in cards:
        if model in (None, card.id, card.root):
            return card.id
    names = ", ".join(card.id for card in cards)
    raise ConfigError(f"{model} is not served there; it has {names}", where=where)


def measure(options: BenchOptions, questions: Sequence[Question]) -> dict[str, Any]:
    """The result of one run: the options, vLLM's names of results, and DETAILS."""
    return asyncio.run(_measure(options, questions))


async def _measure(options: BenchOptions, questions: Sequence[Question]) -> dict[str, Any]:
    async with client_at(options.url) as client:
        name = await served_model(client, options.model)
        count = len(questions)
        first = await stream(client, options, name, questions[0], 0)  # warms the server up
        if first.error:
            raise DraftsmithError(f"a first request failed: {first.error}", where=options.url)
        before = await drafting_counters(client)
        stages = Stages(console=Console(stderr=True))
        with stages.stage(f"requests to {options.url}", count) as advance:
            outcomes, duration = await _send_all(client, options, name, questions, advance)
        drafting = drafting_results(before, await drafting_counters(client))
    description = {
        "model_id": name,
        "num_prompts": count,
        "dataset_name": options.dataset_name,
        "request_parameters": options.body,
        "request_rate": "inf" if math.isinf(options.request_rate) else options.request_rate,
        "max_concurrency": options.max_concurrency,
    }
    return description | latency_results(outcomes, duration) | drafting


async def _send_all(
    client: openai.AsyncOpenAI,
    options: BenchOptions,
    name: str,
    questions: Sequence[Question],
    advance: Advance,
) -> tuple[list[Outcome], float]:
    """Sends every question when it arrives, and returns the outcomes in the order of the questions,
    and the seconds that all of them took. `advance`: is told how many have ended."""
    arrivals = arrival_times(len(questions), options.request_rate, options.seed)
    slots = asyncio.Semaphore(options.max_concurrency or len(questions))
    ended: list[Outcome] = []
    start = time.perf_counter()

    async def ask(index: int) -> Outcome:
        await asyncio.sleep(max(0.0, start + arrivals[index] - time.perf_counter()))
        async with slots:
            outcome = await stream(client, options, name, questions[index], index)
        ended.append(outcome)
        advance(len(ended))
        return outcome

    outcomes = await asyncio.gather(*map(ask, range(len(questions))))
    return outcomes, time.perf_counter() - start


def arrival_times(count: int, rate: float, seed: int) -> list[float]:
    """Seconds after the start at which requests arrive, [count]: a Poisson process.

    As in vLLM its gaps are scaled so that the last request arrives after count/rate seconds, which
    makes the offered rate that of the option. With an infinite rate all arrive at once."""
    times = np.cumsum(np.random.default_rng([seed, 1]).exponential(1.0, count))
    return (times * (count / rate / times[-1])).tolist()


async def stream(
    client: openai.AsyncOpenAI, options: BenchOptions, name: str, question: Question, index: int
) -> Outcome:
    """Sends a request and reads the stream of its answer to the end. Failures of the server or the
    network give an outcome with an error. Every request has a seed of its own, so that sampling
    repeats."""
    fields: dict[str, Any] = {"model": name, "seed": options.seed + index, "stream": True}
    fields |= {"stream_options": {"include_usage": True}, "extra_body": options.body}
    create: Any = client.completions.create
    if options.chat:
        create = client.chat.completions.create
        fields |= {"messages": question.prompt, "max_completion_tokens": question.output_len}
    else:
        fields |= {"prompt": question.prompt, "max_tokens": question.output_len}
    outcome = Outcome()
    try:
        json.dumps(fields, allow_nan=False, ensure_ascii=False).encode()
    except ValueError as error:  # the client's own would read as one of the answer
        outcome.error = f"the request cannot be written as JSON ({error})"
        return outcome
    try:
        await _read(create(**fields), outcome)
    except (openai.OpenAIError, httpx2.HTTPError) as error:
        outcome.error = f"{type(error).__name__}: {error}"
    except (AttributeError, TypeError, ValueError) as error:  # the client reads without checking
        outcome.error = f"an event that is no chunk of OpenAI's API ({error})"
    return outcome


async def _read(request: Awaitable[Any], outcome: Outcome) -> None:
    """Sends a request, and writes what its stream holds into the outcome."""
    times: list[float] = []
    usage: Any = None
    finished = False
    start = time.perf_counter()
    async with await request as chunks:
        async for chunk in chunks:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                if (piece := _piece(choice)) is not None:
                    times.append(time.perf_counter())
                    outcome.text += piece
                finished = finished or choice.finish_reason is not None
    for missing, there in {"token": times, "finish_reason": finished, "usage": usage}.items():
        if not there:
            outcome.error = f"the stream ended without a {missing}"
            return
    outcome.ttft = times[0] - start
    outcome.latency = times[-1] - start
    outcome.itl = tuple(np.diff(times).tolist())
    outcome.prompt_len = int(usage.prompt_tokens)
    outcome.output_tokens = int(usage.completion_tokens)


def _piece(choice: Any) -> str | None:
    """The generated text of a choice; None if it brings no token, as the opening of a chat, which
    names the role. An empty text is a token whose text is held back, or part of a reasoning."""
    delta = getattr(choice, "delta", None)
    if delta is None:
        return choice.text
    if delta.role and not delta.content:
        return None
    return delta.content or ""


# ------------------------------------------------------------------------------- results


def latency_results(outcomes: Sequence[Outcome], duration_s: float) -> dict[str, Any]:
    """The fields of vLLM's result. TPOT is (latency - TTFT) / (tokens - 1), over requests of at
    least two tokens. Throughputs are those of requests that succeeded, over `duration_s`."""
    done = [outcome for outcome in outcomes if not outcome.error]
    prompt_tokens = sum(o.prompt_len for o in done)
    output_tokens = sum(o.output_tokens for o in done)
    result: dict[str, Any] = {
        "duration": duration_s,
        "completed": len(done),
        "failed": len(outcomes) - len(done),
        "total_input_tokens": prompt_tokens,
        "total_output_tokens": output_tokens,
        "request_throughput": len(done) / duration_s,
        "output_throughput": output_tokens / duration_s,
        "total_token_throughput": (prompt_tokens + output_tokens) / duration_s,
        "generated_texts": [o.text for o in outcomes],
        "errors": [o.error for o in outcomes],
    }
    seconds = {
        "ttft": [o.ttft for o in done],
        "tpot": [(o.latency - o.ttft) / (o.output_tokens - 1) for o in done if o.output_tokens > 1],
        "itl": [gap for o in done for gap in o.itl],
        "e2el": [o.latency for o in done],
    }
    for name, values in seconds.items():
        ms = 1000 * np.asarray(values)
        result[f"mean_{name}_ms"] = float(ms.mean()) if len(ms) else None
        for kind, percent in {"median": 50, "p90": 90, "p99": 99}.items():
            result[f"{kind}_{name}_ms"] = float(np.percentile(ms, percent)) if len(ms) else None
    return result


def without_details(result: dict[str, Any]) -> dict[str, Any]:
    """A result without what it has for every request."""
    return {name: value for name, value in result.items() if name not in DETAILS}


async def drafting_counters(client: openai.AsyncOpenAI) -> SpecDecodeCounters | None:
    """The server's own counters. None: it has no /metrics, or does not draft."""
    url = str(client.base_url).removesuffix("/v1/") + "/metrics"
    try:
        return read_counters(await client.get(url, cast_to=str))
    except (openai.OpenAIError, ValueError):
        return None


def drafting_results(
    before: SpecDecodeCounters | None, after: SpecDecodeCounters | None
) -> dict[str, Any]:
    """Acceptance between two readings of the server's counters, under vLLM's names; empty if
    nothing was drafted or the counters were reset. The rate is in per cent. Rates by position are
    joint."""
    if before is None or after is None:
        return {}
    between = after.since(before)
    if between.num_drafts <= 0 or between.num_draft_tokens <= 0:
        return {}
    return {
        "spec_decode_acceptance_rate": 100 * between.num_accepted_tokens / between.num_draft_tokens,
        "spec_decode_acceptance_length": between.acceptance_length,
        "spec_decode_num_drafts": between.num_drafts,
        "spec_decode_draft_tokens": between.num_draft_tokens,
        "spec_decode_accepted_tokens": between.num_accepted_tokens,
        "spec_decode_per_position_acceptance_rates": between.joint_rates(),
    }
