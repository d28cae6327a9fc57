"""Drafting beside no drafting under the same load, at rising concurrency, and which K pays.

All servers run already and take turns, so that what slows the machine slows all. A result is the
median over the repeats, and a gain the quotient of two tokens/s; its range is that of the quotients
within one repeat."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from draftsmith.inference.bench.advice import advised_lengths
from draftsmith.inference.bench.bench_options import BenchOptions
from draftsmith.inference.bench.datasets import Question
from draftsmith.inference.bench.load_generator import (
    client_at,
    drafting_counters,
    measure,
    without_details,
)
from draftsmith.speculators.errors import ConfigError

OFF = "off"
Result = dict[str, Any]


class Serving(NamedTuple):
    """A way of serving. `name`: OFF, or K=1, … `drafts`: K; None for OFF. `changes`: the options of
    a measurement that are its own."""

    name: str
    drafts: int | None
    changes: dict[str, Any]


def compare(
    options: BenchOptions,
    questions: Sequence[Question],
    keep: Callable[[Result], None] = lambda comparison: None,
) -> Result:
    """Measures every K and no drafting at every concurrency, in each repeat. `keep` is given what
    is known after each concurrency, of which a server that dies takes nothing.

    Returns `levels`, each with its `modes` by name, and `advice`: what to serve with, None if a
    request failed or if nothing gained. `repeats`: those of every level that is in it."""
    servings = asyncio.run(_servings(options))
    levels = sorted(set(options.concurrencies))
    results: dict[tuple[int, str], list[Result]] = {}  # by level and name, one for each repeat
    comparison: Result = {}
    for repeat in range(options.repeats):
        first = repeat % len(servings)  # another one begins each time
        for level in levels:
            for serving in servings[first:] + servings[:first]:
                changes = serving.changes | {"max_concurrency": level}
                result = measure(options.model_copy(update=changes), questions)
                results.setdefault((level, serving.name), []).append(result)
            comparison = _comparison(options, servings, results)
            keep(comparison)
    return comparison


def _comparison(
    options: BenchOptions,
    servings: Sequence[Serving],
    results: Mapping[tuple[int, str], Sequence[Result]],
) -> Result:
    """Of the levels that are measured so far."""
    levels = sorted({level for level, _ in results})
    rows: dict[int, dict[str, Result]] = {}
    gains: dict[int, dict[int, float]] = {}  # by level and K
    for level in levels:
        rows[level] = {}
        gains[level] = {}
        for serving in servings:
            row = _row(results[level, serving.name], results[level, OFF])
            rows[level][serving.name] = row
            if serving.drafts is not None:
                gains[level][serving.drafts] = row["gain"]
    failed = sum(result["failed"] for repeats in results.values() for result in repeats)
    return {
        "model_id": results[levels[0], OFF][0]["model_id"],
        "dataset_name": options.dataset_name,
        "repeats": min(len(results[level, OFF]) for level in levels),
        "failed": failed,
        "levels": [{"max_concurrency": level, "modes": modes} for level, modes in rows.items()],
        "advice": None if failed else advised_lengths(gains),
    }


async def _servings(options: BenchOptions) -> list[Serving]:
    """The ways of serving, OFF first. Servers of this project take K with each request; of vLLM
    there is one for each K. ConfigError for a server that does not draft, or two of the same K."""
    servings = [Serving(OFF, None, {"base_url": (options.baseline_url,)})]
    for url in options.base_url:
        where = f"--base-url {url}"
        async with client_at(url) as client:
            counters = await drafting_counters(client)
        if counters is None:
            raise ConfigError(
                "its /metrics count no drafts; give a server that drafts and has vLLM's counters",
                where=where,
            )
        most = len(counters.num_accepted_tokens_per_pos)
        for tokens in options.draft_lengths or (most,):
            if tokens > most:
                raise ConfigError(
                    f"drafts {most} tokens at most, and --draft-lengths asks for {tokens}; leave"
                    " that out, or serve with more num_speculative_tokens",
                    where=where,
                )
            if any(serving.drafts == tokens for serving in servings):
                raise ConfigError(
                    f"K = {tokens} is measured already; give every K once, and of one server",
                    where=where,
                )
            body = {"num_speculative_tokens": tokens} if options.draft_lengths else {}
            body = options.extra_body | body
            changes = {"base_url": (url,), "extra_body": body}
            servings.append(Serving(f"K={tokens}", tokens, changes))
    return servings


def _row(repeats: Sequence[Result], off: Sequence[Result]) -> Result:
    """The result of one way of serving, and what it gains over `off`; with temperature 0, how many
    answers are the text that is written without drafting."""
    row = without_details(repeats[0])
    for name, value in row.items():
        # counters may be lost in a repeat
        values = [result[name] for result in repeats if name in result]
        if isinstance(value, float) and None not in values:
            row[name] = median(values)
    if repeats is off:
        return row
    ratios = [
        result["output_throughput"] / alone["output_throughput"]
        for result, alone in zip(repeats, off, strict=True)
        if alone["output_throughput"]
    ]
    alone = median(result["output_throughput"] for result in off)
    row["gain"] = row["output_throughput"] / alone if alone else 0.0
    row["gain_range"] = [min(ratios, default=0.0), max(ratios, default=0.0)]
    if row["request_parameters"].get("temperature") == 0:
        pairs = zip(repeats[0]["generated_texts"], off[0]["generated_texts"], strict=True)
        row["identical_outputs"] = sum(text == reference for text, reference in pairs)
    return row
