"""One measurement of a server: who it is, what it is asked, how it answered; as the result that vLLM would write."""

from __future__ import annotations

import asyncio
import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from tqdm import tqdm

from inference.bench.client import (
    Outcome,
    ask,
    context_length,
    drafting_counters,
    make_client,
    served_model,
)
from inference.bench.datasets import (
    LOAD_ONLY,
    DatasetOptions,
    Question,
    as_chats,
    as_texts,
    load_questions,
    require_room,
)
from inference.bench.figures import DETAILS, drafting_figures, figures
from inference.bench.load import arrival_times, offer
from speculators.errors import ConfigError, DraftsmithError

ENDPOINTS = {"openai": "/v1/completions", "vllm": "/v1/completions", "openai-chat": "/v1/chat/completions"}
TEXTS = ("openai", "vllm")  # backends that take texts; the other takes conversations


@dataclass(frozen=True)
class BenchOptions:
    """What is measured and how; vLLM's options of these names. `num_warmups`: requests before the measurement."""

    dataset: DatasetOptions
    base_url: str
    backend: str = "openai"
    endpoint: str = ENDPOINTS["openai"]
    model: str | None = None
    served_model_name: str | None = None
    tokenizer: str | None = None
    trust_remote_code: bool = False
    skip_chat_template: bool = False
    request_rate: float = math.inf
    burstiness: float = 1.0
    max_concurrency: int | None = None
    num_warmups: int = 0
    ignore_eos: bool = False
    body: dict[str, Any] = field(default_factory=dict)  # sampling parameters, and what else every request says
    headers: dict[str, str] = field(default_factory=dict)
    insecure: bool = False
    request_timeout_s: float = 6 * 3600
    percentile_metrics: tuple[str, ...] = ("ttft", "tpot", "itl", "e2el")
    metric_percentiles: tuple[float, ...] = (50, 90, 99)
    label: str | None = None
    metadata: dict[str, str] = field(default_factory=dict)
    show_progress: bool = True


@dataclass(frozen=True)
class Work:
    """What the servers of one command are asked, made once: ratios are of the same requests."""

    questions: list[Question]
    model_id: str
    tokenizer_id: str | None
    count_tokens: Callable[[str], int] | None


def prepare(options: BenchOptions) -> Work:
    """Reads the dataset; asks the server for its model, whose tokenizer may be needed, if the options name none."""
    model_id = options.model or asyncio.run(_served(options))[1]
    tokenizer, name = None, options.tokenizer or model_id
    written = options.backend in TEXTS and not options.skip_chat_template
    if options.tokenizer or written or options.dataset.name == "random":
        from inference.entrypoints.loading import load_tokenizer

        tokenizer = load_tokenizer(model_id, options.tokenizer, trust_remote_code=options.trust_remote_code)
    questions = load_questions(options.dataset, tokenizer)
    if options.backend in TEXTS:
        questions = as_texts(questions, tokenizer, raw=options.skip_chat_template)
    else:
        questions = as_chats(questions)
    count = None if tokenizer is None else lambda text: len(tokenizer(text, add_special_tokens=False).input_ids)
    return Work(questions, model_id, None if tokenizer is None else name, count)


async def _served(options: BenchOptions) -> tuple[str, str]:
    async with _client(options) as client:
        return await served_model(client, options.base_url)


def _client(options: BenchOptions) -> Any:
    key = os.environ.get("OPENAI_API_KEY")
    headers = ({"Authorization": f"Bearer {key}"} if key else {}) | options.headers
    return make_client(headers, options.request_timeout_s, insecure=options.insecure)


def measure(options: BenchOptions, work: Work) -> dict[str, Any]:
    """The result of one run: vLLM's fields, lists of every request among them, and what was asked."""
    return asyncio.run(_measure(options, work))


async def _measure(options: BenchOptions, work: Work) -> dict[str, Any]:
    async with _client(options) as client:
        name = options.served_model_name or options.model or (await served_model(client, options.base_url))[0]
        require_room(options.dataset, await context_length(client, options.base_url, name))
        url = options.base_url + options.endpoint
        bodies = [request_body(options, name, question, i) for i, question in enumerate(work.questions)]

        async def send(body: dict[str, Any]) -> Outcome:
            return await ask(client, url, body, options.request_timeout_s, work.count_tokens)

        await _warm_up(options, bodies, send)
        rate, seed = options.request_rate, options.dataset.seed
        arrivals = arrival_times(len(bodies), rate, options.burstiness, seed)
        before = await drafting_counters(client, options.base_url)
        with tqdm(total=len(bodies), disable=not options.show_progress, unit="request", leave=False) as bar:

            async def send_and_tell(body: dict[str, Any]) -> Outcome:
                outcome = await send(body)
                bar.update()
                return outcome

            outcomes, duration = await offer(bodies, arrivals, options.max_concurrency, send_and_tell)
        after = await drafting_counters(client, options.base_url)
    found = figures(outcomes, duration, options.percentile_metrics, options.metric_percentiles)
    return _asked(options, work, len(bodies)) | found | drafting_figures(before, after)


async def _warm_up(options: BenchOptions, bodies: Sequence[dict[str, Any]], send: Any) -> None:
    """Requests that are not measured; if they fail nothing is worth measuring."""
    warm = [bodies[i % len(bodies)] for i in range(options.num_warmups)]
    outcomes, _ = await offer(warm, [0.0] * len(warm), options.max_concurrency, send)
    for failed in (each for each in outcomes if not each.success):
        raise DraftsmithError(f"{options.base_url}{options.endpoint}: a warm-up request failed: {failed.error}")


def request_body(options: BenchOptions, model: str, question: Question, index: int) -> dict[str, Any]:
    """What is sent: OpenAI's fields, `ignore_eos` (vLLM's) where it was asked for, and what the options add. Every
    request has a seed of its own, so that sampling can be repeated."""
    body: dict[str, Any] = {
        "model": model, "stream": True, "stream_options": {"include_usage": True}, "seed": options.dataset.seed + index,
    }  # fmt: skip
    if options.backend in TEXTS:
        body |= {"prompt": question.prompt, "max_tokens": question.output_len}
    else:
        body |= {"messages": list(question.messages), "max_completion_tokens": question.output_len}
    if options.ignore_eos:
        body["ignore_eos"] = True
    return body | options.body


def _asked(options: BenchOptions, work: Work, count: int) -> dict[str, Any]:
    load_only = options.dataset.name == "random"
    return {
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": options.backend,
        "backend": options.backend,
        "label": options.label,
        "model_id": work.model_id,
        "tokenizer_id": work.tokenizer_id,
        "num_prompts": count,
        **options.metadata,
        "dataset_name": options.dataset.name,
        "seed": options.dataset.seed,
        "ignore_eos": options.ignore_eos,
        "request_parameters": options.body,
        **({"note": LOAD_ONLY} if load_only else {}),
        "request_rate": "inf" if math.isinf(options.request_rate) else options.request_rate,
        "burstiness": options.burstiness,
        "max_concurrency": options.max_concurrency,
    }


def without_details(result: dict[str, Any]) -> dict[str, Any]:
    """A result without its lists of every request, as vLLM saves it unless told otherwise."""
    return {name: value for name, value in result.items() if name not in DETAILS}


def result_path(result: dict[str, Any], folder: str | None, name: str | None) -> Path:
    """Where a result goes; the name is vLLM's."""
    concurrency = "" if result["max_concurrency"] is None else f"-concurrency{result['max_concurrency']}"
    model = str(result["model_id"]).rstrip("/").split("/")[-1]
    label = result["label"] or result["backend"]
    made = f"{label}-{result['request_rate']}qps{concurrency}-{model}-{result['date']}.json"
    return Path(folder or ".") / (name or made)


def save(result: dict[str, Any], path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: the result could not be written: {error.strerror}; give another --result-dir "
                          "or --result-filename") from error  # fmt: skip
