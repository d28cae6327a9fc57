"""Drafting beside no drafting under the same load, at rising concurrency, and which K pays.

All servers run already and take turns, so that what slows the machine slows all. A result is the
median over the repeats, and a gain the quotient of two tokens/s; its range is that of the quotients
within one repeat."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from draftsmith.inference.bench.advice import advised_lengths
from draftsmith.inference.bench.load import (
    Work,
    client_at,
    drafting_counters,
    measure,
    without_details,
)
from draftsmith.inference.bench.options import BenchOptions
from draftsmith.speculators.errors import ConfigError

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
    rows = {level: _level(results, level, [*modes]) for level in levels}
    gains = {
        level: {
            tokens: rows[level][f"K={tokens}"]["gain"] for tokens in modes if tokens is not None
        }
        for level in levels
    }
    return {
        "model_id": work.model_id,
        "dataset_name": options.dataset_name,
        "repeats": options.repeats,
        "failed": failed,
        "levels": [{"max_concurrency": level, "modes": rows[level]} for level in levels],
        "advice": None if failed else advised_lengths(gains),
    }


async def serving_modes(options: BenchOptions) -> dict[int | None, Mode]:
    """What is measured, by its K; None: without drafting. Servers of this project take K with each
    request; of vLLM there is one for each K. ConfigError for a server that does not draft, or two
    of the same K."""
    modes: dict[int | None, Mode] = {None: Mode(str(options.baseline_url))}
    for url in options.base_url:
        async with client_at(url) as client:
            counters = await drafting_counters(client)
        if counters is None:
            raise ConfigError("its /metrics tell of no drafting", where=f"--base-url {url}")
        most = len(counters.num_accepted_tokens_per_pos)
        for tokens in options.draft_lengths or (most,):
            if tokens > most or tokens in modes:
                kind = f"drafts {most} at most" if tokens > most else "is measured already"
                raise ConfigError(f"K = {tokens} {kind}", where=f"--base-url {url}")
            body = {"num_speculative_tokens": tokens} if options.draft_lengths else {}
            modes[tokens] = Mode(url, body)
    return modes


def _level(results: Results, level: int, modes: Sequence[int | None]) -> dict[str, dict[str, Any]]:
    """The results of every way of serving at a concurrency, by name; with temperature 0, how many
    answers are the text that is written without drafting."""
    off, rows = results[None, level], dict[str, dict[str, Any]]()
    for tokens in modes:
        repeats = results[tokens, level]
        row = without_details(repeats[0])
        for name, value in row.items():
            values = [result[name] for result in repeats]
            if isinstance(value, float) and None not in values:
                row[name] = median(values)
        rows["off" if tokens is None else f"K={tokens}"] = row
        if tokens is None:
            continue
        speeds = [[one["output_throughput"] for one in side] for side in (repeats, off)]
        ratios = [on / alone if alone else 0.0 for on, alone in zip(*speeds)]
        alone = median(speeds[1])
        row["gain"] = median(speeds[0]) / alone if alone else 0.0
        row["gain_range"] = [min(ratios), max(ratios)]
        if row["request_parameters"].get("temperature") == 0:
            pairs = zip(repeats[0]["generated_texts"], off[0]["generated_texts"])
            row["identical_outputs"] = sum(on == alone for on, alone in pairs)
    return rows
