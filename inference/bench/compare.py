"""Drafting off and on under the same load, at rising concurrency: ratios and the advice.

A ratio is on ÷ off. Tokens/s per user are 1 ÷ TPOT. Of several repeats the one with the median
speed is reported."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from inference.bench.advice import LevelSpeeds, advise
from inference.bench.options import BenchOptions
from inference.bench.run import LOAD_ONLY, Work, measure, without_details

MODES = ("off", "on")
RATIOS = (
    "output_throughput",
    "total_token_throughput",
    "request_throughput",
    "tokens_per_second_per_user",
    "median_ttft_ms",
    "median_tpot_ms",
    "median_itl_ms",
    "median_e2el_ms",
    "p99_e2el_ms",
)
WARMUPS = 2  # of each server, unless --num-warmups says otherwise

Results = dict[tuple[str, int], list[dict[str, Any]]]  # of every repeat, by mode and concurrency
Server = Callable[
    [], AbstractContextManager[str]
]  # opened, it gives the base URL of a server that answers


@dataclass(frozen=True)
class Mode:
    """One way of serving: a server by its name, fields of every request, and the fixed K, if it is
    one."""

    server: str
    body: dict[str, Any] = field(default_factory=dict)
    tokens: int | None = None


OFF_AND_ON = {mode: Mode(mode) for mode in MODES}


def compare(
    options: BenchOptions,
    work: Work,
    servers: dict[str, Server],
    *,
    together: bool,
    modes: dict[str, Mode] = OFF_AND_ON,
    config: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Measures every mode at every concurrency, in each repeat. `together`: all servers run at the
    same time and take turns, so that a slow machine slows all; otherwise they are started one after
    the other, anew in each repeat, which needs the memory of one. `config`: the speculative_config
    that is measured, for the advice."""
    levels = sorted(set(options.concurrencies))
    results: Results = {(mode, level): [] for mode in modes for level in levels}

    warmups = WARMUPS if options.num_warmups is None else options.num_warmups

    def turn(urls: dict[str, str], repeat: int, cold: bool) -> None:
        """Every mode of these servers at every level; who begins changes with the repeat."""
        names = [mode for mode in modes if modes[mode].server in urls]
        names = names[repeat % len(names) :] + names[: repeat % len(names)]
        for level in levels:
            for name in names:
                changes = {
                    "base_url": urls[modes[name].server],
                    "max_concurrency": level,
                    "num_warmups": warmups if cold and level == levels[0] else 0,
                    "extra_body": options.extra_body | modes[name].body,
                }
                results[name, level].append(measure(options.model_copy(update=changes), work))

    with ExitStack() as running:
        urls = (
            {name: running.enter_context(server()) for name, server in servers.items()}
            if together
            else {}
        )
        for repeat in range(options.repeats):
            if together:
                turn(urls, repeat, cold=repeat == 0)
                continue
            for name, server in servers.items():
                with server() as url:
                    turn({name: url}, repeat, cold=True)
    greedy = options.body.get("temperature") == 0
    compared = [
        _level(n, _median(results["off", n]), _median(results["on", n]), greedy) for n in levels
    ]
    failed = sum(result["failed"] for repeats in results.values() for result in repeats)
    comparison: dict[str, Any] = {
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        "model_id": work.model_id,
        "dataset_name": options.dataset_name,
        **({"note": LOAD_ONLY} if options.load_only else {}),
        "failed": failed,
        "levels": compared,
    }
    return (
        comparison
        if config is None or failed
        else comparison | _advice(results, levels, modes, config)
    )


def _median(repeats: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The repeat with the median speed; of an even number the slower of the two."""
    return sorted(repeats, key=lambda result: result["output_throughput"])[(len(repeats) - 1) // 2]


def _advice(
    results: Results, levels: Sequence[int], modes: dict[str, Mode], config: dict[str, Any]
) -> dict[str, Any]:
    """Which K to serve with."""

    def speeds(mode: str, level: int) -> tuple[float, ...]:
        return tuple(result["output_throughput"] for result in results[mode, level])

    lengths = {mode.tokens: name for name, mode in modes.items() if mode.tokens is not None}
    measured = [
        LevelSpeeds(
            n, speeds("off", n), {tokens: speeds(name, n) for tokens, name in lengths.items()}
        )
        for n in levels
    ]
    return {"advice": advise(measured, config)}


def _level(
    concurrency: int, off: dict[str, Any], on: dict[str, Any], greedy: bool
) -> dict[str, Any]:
    for result in (off, on):
        tpot = result.get("median_tpot_ms")
        result["tokens_per_second_per_user"] = 1000 / tpot if tpot else None
    ratios = {n: on[n] / off[n] if on.get(n) is not None and off.get(n) else None for n in RATIOS}
    level: dict[str, Any] = {"max_concurrency": concurrency, "ratios": ratios}
    if greedy:
        columns = (result[name] for result in (off, on) for name in ("generated_texts", "errors"))
        same = [
            a == b
            for a, a_error, b, b_error in zip(*columns, strict=True)
            if not (a_error or b_error)
        ]
        level |= {"identical_outputs": sum(same), "compared_outputs": len(same)}
    return level | {"off": without_details(off), "on": without_details(on)}
