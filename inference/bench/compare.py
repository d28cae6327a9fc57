"""Drafting beside no drafting under the same load, at rising concurrency, and which K pays.

All servers run already and take turns, so that what slows the machine slows all. A gain is tokens/s
÷ those of the server without drafting in the same repeat."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from inference.bench.advice import advised_lengths
from inference.bench.load import Work, client_of, drafting_counters, measure, without_details
from inference.bench.options import BenchOptions
from speculators.errors import ConfigError

Results = dict[
    tuple[int | None, int], list[dict[str, Any]]
]  # of every repeat, by K and concurrency


@dataclass(frozen=True)
class Mode:
    """One way of serving: a server, and fields of every request."""

    url: str
    body: dict[str, Any] = field(default_factory=dict)


def compare(options: BenchOptions, work: Work) -> dict[str, Any]:
    """Measures every K and no drafting at every concurrency, in each repeat.

    Returns `levels`, each with its `modes` by name, and `advice`: what to serve with, None if a
    request failed or if nothing gained."""
    modes = asyncio.run(serving_modes(options))
    levels = sorted(set(options.concurrencies))
    results: Results = {(tokens, level): [] for tokens in modes for level in levels}
    for repeat in range(options.repeats):
        first = repeat % len(modes)  # another one begins each time
        order = [*modes][first:] + [*modes][:first]
        for level in levels:
            for tokens in order:
                body = options.extra_body | modes[tokens].body
                changes = {"base_url": (modes[tokens].url,), "max_concurrency": level}
                result = measure(options.model_copy(update=changes | {"extra_body": body}), work)
                results[tokens, level].append(result)
    failed = sum(result["failed"] for repeats in results.values() for result in repeats)
    gains = {level: _gains(results, level) for level in levels}
    return {
        "model_id": work.model_id,
        "dataset_name": options.dataset_name,
        "repeats": options.repeats,
        "failed": failed,
        "levels": [_level(results, level, gains[level]) for level in levels],
        "advice": None if failed else advised_lengths(gains),
    }


async def serving_modes(options: BenchOptions) -> dict[int | None, Mode]:
    """What is measured, by its K; None: without drafting. Servers of this project take K with each
    request; of vLLM there is one for each K. ConfigError for a server that does not draft, or two
    of the same K."""
    modes: dict[int | None, Mode] = {None: Mode(str(options.baseline_url))}
    for url in options.base_url:
        async with client_of(options, url) as client:
            counters = await drafting_counters(client)
        if counters is None:
            raise ConfigError(f"--base-url {url}: its /metrics tell of no drafting")
        most = len(counters.num_accepted_tokens_per_pos)
        for tokens in options.draft_lengths or (most,):
            if tokens > most or tokens in modes:
                kind = f"drafts {most} at most" if tokens > most else "is measured already"
                raise ConfigError(f"--base-url {url}: K = {tokens} {kind}")
            body = {"num_speculative_tokens": tokens} if options.draft_lengths else {}
            modes[tokens] = Mode(url, body)
    return modes


def _gains(results: Results, level: int) -> dict[int, list[float]]:
    """Of every repeat, by K."""
    speeds = {
        tokens: [result["output_throughput"] for result in repeats]
        for (tokens, at), repeats in results.items()
        if at == level
    }
    return {
        tokens: [on / off if off else 0.0 for on, off in zip(values, speeds[None])]
        for tokens, values in speeds.items()
        if tokens is not None
    }


def _level(results: Results, level: int, gains: Mapping[int, Sequence[float]]) -> dict[str, Any]:
    """The figures of every K at a concurrency, each of the repeat with the median speed; with
    temperature 0, how many of its answers are the text that is written without drafting."""
    off = _median(results[None, level])
    modes: dict[str, Any] = {"off": without_details(off)}
    for tokens, values in gains.items():
        result = _median(results[tokens, level])
        mode = modes[f"K={tokens}"] = without_details(result)
        mode["gain"] = [median(values), min(values), max(values)]
        if result["request_parameters"].get("temperature") == 0:
            pairs = zip(result["generated_texts"], off["generated_texts"])
            mode["identical_outputs"] = sum(on == alone for on, alone in pairs)
    return {"max_concurrency": level, "modes": modes}


def _median(repeats: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The repeat with the median speed; of an even number the slower of the two."""
    return sorted(repeats, key=lambda result: result["output_throughput"])[(len(repeats) - 1) // 2]
