"""One measurement of a server: requests arrive, their streams are timed, and the result has vLLM's
fields.

The server counts the tokens (`usage`): with drafting, a piece of a stream may hold several.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from typing import Any

import numpy as np
from tqdm import tqdm

from inference.bench.datasets import Question, as_chat, as_text, load_questions, require_room
from inference.bench.figures import DETAILS, Outcome, drafting_figures, figures
from inference.bench.options import BenchOptions
from inference.evaluation.suites import SUITES, sha256_of, suite_files
from inference.http_client import RequestFailed, ServerClient, drafting_counters
from inference.metrics import SpecDecodeCounters
from speculators.errors import DraftsmithError

KEY = "OPENAI_API_KEY"
LOAD_ONLY = "random: load only; acceptance on random tokens says nothing about a drafter"
UNASKED = "not asked: the turn before it failed"
GENERATED = (
    "content",
    "reasoning_content",
    "reasoning",
    "tool_calls",
)  # fields of a chat's delta with generated text

Send = Callable[[int], Awaitable[list[Outcome]]]  # the turns of the conversation of that number


@dataclass(frozen=True)
class Work:
    """The requests of one command, made once: servers that are compared get the same.

    count_tokens   for servers that report no usage
    dress          makes a text or a chat of a conversation, as the backend wants it
    """

    questions: list[Question]
    model_id: str
    tokenizer_id: str | None
    count_tokens: Callable[[str], int] | None
    dress: Callable[[Question], Question] = lambda question: question


def prepare(options: BenchOptions) -> Work:
    """Reads the dataset. Asks the server for its model if the options name none."""
    model_id = options.model or asyncio.run(_served_model(options))
    tokenizer = count_tokens = None
    if options.tokenizer or options.load_only or not (options.chat or options.skip_chat_template):
        from inference.entrypoints.loading import load_tokenizer

        tokenizer = load_tokenizer(
            model_id, options.tokenizer, trust_remote_code=options.trust_remote_code
        )
        count_tokens = lambda text: len(tokenizer(text, add_special_tokens=False).input_ids)
    dress = (
        as_chat
        if options.chat
        else partial(as_text, tokenizer=tokenizer, raw=options.skip_chat_template)
    )
    questions = [dress(question) for question in load_questions(options, tokenizer)]
    return Work(
        questions,
        model_id,
        (options.tokenizer or model_id) if tokenizer else None,
        count_tokens,
        dress,
    )


def _client(options: BenchOptions) -> ServerClient:
    return ServerClient(options.url, options.request_timeout, key_env=KEY)


async def _served_model(options: BenchOptions) -> str:
    async with _client(options) as client:
        card = (await client.models())[0]
    return card.get("root") or card["id"]


def measure(options: BenchOptions, work: Work) -> dict[str, Any]:
    """The result of one run: the options, vLLM's figures, and lists with a value of every
    request."""
    return asyncio.run(_measure(options, work))


async def _measure(options: BenchOptions, work: Work) -> dict[str, Any]:
    async with _client(options) as client:
        name, context = await _model_of(client, options)
        require_room(options, context)
        count = len(work.questions)

        async def send(question: Question, index: int) -> Outcome:
            return await stream(
                client, options, request_body(options, name, question, index), work.count_tokens
            )

        async def warm_up(number: int) -> list[Outcome]:
            return [await send(work.questions[number % count], number % count)]

        warmups = options.num_warmups or 0
        for outcome in (await offer([0.0] * warmups, options.max_concurrency, warm_up))[0]:
            if not outcome.success:
                raise DraftsmithError(
                    f"{options.url}{options.route}: a warm-up request failed: {outcome.error}"
                )
        arrivals = arrival_times(count, options.request_rate, options.seed)
        before = await _drafting(client)
        turns = sum(1 + len(question.later) for question in work.questions)
        with tqdm(total=turns, disable=options.disable_tqdm, unit="request", leave=False) as bar:

            async def hold(number: int) -> list[Outcome]:
                question, outcomes = work.questions[number], list[Outcome]()
                while True:
                    outcomes.append(await send(question, number + len(outcomes) * count))
                    bar.update()
                    if not question.later or not outcomes[-1].success:
                        return outcomes + [Outcome(error=UNASKED)] * len(question.later)
                    question = work.dress(question.then(outcomes[-1].text))

            outcomes, duration = await offer(arrivals, options.max_concurrency, hold)
        after = await _drafting(client)
    measured = figures(outcomes, duration, options.percentile_metrics, options.metric_percentiles)
    return _description(options, work) | measured | drafting_figures(before, after)


async def _model_of(client: ServerClient, options: BenchOptions) -> tuple[str, int | None]:
    """The name that requests hold, and the model's context length if the server tells it."""
    name = options.served_model_name or options.model
    try:
        cards = await client.models()
    except RequestFailed as failure:
        if name is None or failure.reason == "connection":  # nothing listens
            raise
        return name, None
    name = name or cards[0]["id"]
    limits = [card.get("max_model_len") for card in cards if card["id"] == name]
    return name, limits[0] if limits else None


async def _drafting(client: ServerClient) -> SpecDecodeCounters | None:
    """None: the server has no /metrics, or does not draft."""
    try:
        return drafting_counters(await client.metrics())
    except RequestFailed:
        return None


def request_body(
    options: BenchOptions, model: str, question: Question, index: int
) -> dict[str, Any]:
    """OpenAI's fields, and those of the options. Every request has a seed of its own, so that
    sampling repeats."""
    body: dict[str, Any] = {
        "model": model,
        "stream": True,
        "stream_options": {"include_usage": True},
        "seed": options.seed + index,
    }
    if options.chat:
        body |= {"messages": list(question.messages), "max_completion_tokens": question.output_len}
    else:
        body |= {"prompt": question.prompt, "max_tokens": question.output_len}
    if options.ignores_eos:
        body["ignore_eos"] = True
    return body | options.body


def arrival_times(count: int, rate: float, seed: int) -> list[float]:
    """Seconds after the start at which requests arrive, [count]: a Poisson process.

    As in vLLM its gaps are scaled so that the last request arrives after count/rate seconds, which
    makes the offered rate that of the option. With an infinite rate all arrive at once."""
    if math.isinf(rate) or count == 0:
        return [0.0] * count
    times = np.cumsum(np.random.default_rng([seed, 1]).exponential(1.0, count))
    return (times * (count / rate / times[-1])).tolist()


async def offer(
    arrivals: Sequence[float], max_concurrency: int | None, send: Send
) -> tuple[list[Outcome], float]:
    """Begins every conversation when it arrives, at most `max_concurrency` at a time.

    Returns the outcomes in the order of the conversations and their turns, and the seconds it took.
    The `queue_time` of a first turn is the wait for a free slot; no latency includes it."""
    slots = asyncio.Semaphore(max_concurrency or max(1, len(arrivals)))
    start = time.perf_counter()

    async def send_at(number: int, arrival: float) -> list[Outcome]:
        await asyncio.sleep(max(0.0, start + arrival - time.perf_counter()))
        arrived = time.perf_counter()
        async with slots:
            queue_time = time.perf_counter() - arrived
            first, *later = await send(number)
            return [replace(first, queue_time=queue_time), *later]

    held = await asyncio.gather(*(send_at(number, at) for number, at in enumerate(arrivals)))
    return [outcome for outcomes in held for outcome in outcomes], time.perf_counter() - start


async def stream(
    client: ServerClient,
    options: BenchOptions,
    body: dict[str, Any],
    count_tokens: Callable[[str], int] | None,
) -> Outcome:
    """Sends a request and reads the stream of its answer to the end. Failures of the server or the
    network give an outcome without success."""
    start = end = time.perf_counter()
    times: list[float] = []
    text, finished, usage = "", False, dict[str, Any]()
    try:
        async with asyncio.timeout(options.request_timeout):
            async for event in client.events(options.route, body):
                now = time.perf_counter()
                usage = event.get("usage") or usage
                for choice in event.get("choices") or ():
                    piece = _piece(choice)
                    if piece is not None:
                        times.append(now)
                        text += piece
                    if piece is not None or choice.get("finish_reason"):
                        end = now
                    finished = finished or bool(choice.get("finish_reason"))
        tokens = usage.get("completion_tokens")
        if tokens is None and count_tokens is not None:
            tokens = count_tokens(text)
        error = ""
        if not times:
            error = "the stream ended without a token"
        elif not finished:
            error = "the stream broke off: no choice gave a finish_reason"
        elif tokens is None:
            error = (
                "the server reports no usage for streams; name its tokenizer with --tokenizer to"
                " count tokens"
            )
    except RequestFailed as failure:
        error = str(failure)
    except TimeoutError:
        error = f"TimeoutError after {time.perf_counter() - start:.1f} s"
    if error or tokens is None:
        return Outcome(error=error, start_time=start, latency=time.perf_counter() - start)
    return Outcome(
        success=True,
        start_time=start,
        ttft=times[0] - start,
        latency=end - start,
        itl=tuple(np.diff(times).tolist()),
        prompt_len=usage.get("prompt_tokens") or 0,
        output_tokens=tokens,
        text=text,
    )


def _piece(choice: Mapping[str, Any]) -> str | None:
    """The generated text of a choice; None if it brings no token. An empty text is a token whose
    text is held back. The opening of a chat, which names the role, brings none."""
    delta = choice.get("delta")
    if delta is None:
        return choice.get("text")
    text = delta.get("content")
    if any(delta.get(name) for name in GENERATED):
        return text if isinstance(text, str) else ""
    return "" if text is not None and not delta.get("role") else None


def _description(options: BenchOptions, work: Work) -> dict[str, Any]:
    name = options.dataset_name
    suite = suite_files(name, str(options.dataset_path)) if name in SUITES else ()
    return {
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": options.backend,
        "backend": options.backend,
        "label": options.label,
        "model_id": work.model_id,
        "tokenizer_id": work.tokenizer_id,
        "num_prompts": len(work.questions),
        "dataset_name": name,
        **({"dataset_sha256": {file.name: sha256_of(file) for file in suite}} if suite else {}),
        "seed": options.seed,
        "ignore_eos": options.ignores_eos,
        "request_parameters": options.body,
        **({"note": LOAD_ONLY} if options.load_only else {}),
        "request_rate": "inf" if math.isinf(options.request_rate) else options.request_rate,
        "max_concurrency": options.max_concurrency,
    }


def without_details(result: dict[str, Any]) -> dict[str, Any]:
    """A result without its lists of every request, as vLLM saves it by default."""
    return {name: value for name, value in result.items() if name not in DETAILS}
