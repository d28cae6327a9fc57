"""Drafting off and on under the same load, at rising concurrency: ratios, the front of what is best, and its picture.

A ratio is on ÷ off. Per user means 1 ÷ TPOT: how fast one answer is written while the others are too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from inference.bench.datasets import LOAD_ONLY
from inference.bench.run import BenchOptions, Work, measure, without_details

MODES = ("off", "on")
COLOURS = {"off": "#d98a29", "on": "#2f6db3"}
MARKERS = {"off": "s", "on": "o"}
RATIOS = (
    "output_throughput", "total_token_throughput", "request_throughput", "tokens_per_second_per_user",
    "median_ttft_ms", "median_tpot_ms", "median_itl_ms", "median_e2el_ms", "p99_e2el_ms",
)  # fmt: skip

Server = Callable[[], AbstractContextManager[str]]  # opened: the base URL of a server that answers


def compare(
    options: BenchOptions, work: Work, servers: dict[str, Server], concurrencies: Sequence[int], *, together: bool
) -> dict[str, Any]:
    """Measures both servers at every concurrency. `together`: both are there at the same time and take turns, so that a
    machine that slows down does so for both; otherwise one after the other, which needs the memory of one."""
    measured: dict[tuple[str, int], dict[str, Any]] = {}
    warm: set[str] = set()

    def at(mode: str, url: str, concurrency: int) -> None:
        warmups = 0 if mode in warm else options.num_warmups
        warm.add(mode)
        asked = replace(options, base_url=url, max_concurrency=concurrency, num_warmups=warmups)
        measured[mode, concurrency] = measure(asked, work)

    if together:
        with ExitStack() as stack:
            urls = {mode: stack.enter_context(servers[mode]()) for mode in MODES}
            for concurrency in concurrencies:
                for mode in MODES:
                    at(mode, urls[mode], concurrency)
    else:
        for mode in MODES:
            with servers[mode]() as url:
                for concurrency in concurrencies:
                    at(mode, url, concurrency)
    greedy = options.body.get("temperature") == 0
    levels = [_level(c, measured["off", c], measured["on", c], greedy) for c in concurrencies]
    _mark_front(levels)
    return {
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        "model_id": work.model_id,
        "dataset_name": options.dataset.name,
        **({"note": LOAD_ONLY} if options.dataset.name == "random" else {}),
        "levels": levels,
    }


def _level(concurrency: int, off: dict[str, Any], on: dict[str, Any], greedy: bool) -> dict[str, Any]:
    for result in (off, on):
        tpot = result.get("median_tpot_ms")
        result["tokens_per_second_per_user"] = 1000 / tpot if tpot else None
    level = {"max_concurrency": concurrency, "ratios": {name: _ratio(on.get(name), off.get(name)) for name in RATIOS}}
    if greedy:
        both = [
            a == b
            for a, b, *failed in zip(
                off["generated_texts"], on["generated_texts"], off["errors"], on["errors"], strict=True
            )
            if not any(failed)
        ]
        level |= {"identical_outputs": sum(both), "compared_outputs": len(both)}
    return level | {"off": without_details(off), "on": without_details(on)}


def _ratio(on: float | None, off: float | None) -> float | None:
    return on / off if on is not None and off else None


def points(levels: Sequence[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], float, float]]:
    """(result, tokens/s per user, output tokens/s of all) of every measurement that has both."""
    for result in (level[mode] for level in levels for mode in MODES):
        if result["tokens_per_second_per_user"] is not None and result["completed"]:
            yield result, result["tokens_per_second_per_user"], result["output_throughput"]


def pareto_front(places: Sequence[tuple[float, float]]) -> list[int]:
    """Indices of the places that no other surpasses in one co-ordinate without losing in the other."""

    def beaten(a: tuple[float, float]) -> bool:
        return any(b[0] >= a[0] and b[1] >= a[1] and b != a for b in places)

    return [i for i, place in enumerate(places) if not beaten(place)]


def _mark_front(levels: Sequence[dict[str, Any]]) -> None:
    found = list(points(levels))
    front = set(pareto_front([(user, total) for _, user, total in found]))
    for i, (result, *_) in enumerate(found):
        result["on_pareto_front"] = i in front


def draw(comparison: dict[str, Any], path: Path) -> None:
    """Tokens/s of one user against those of all; a curve with drafting and one without, the front behind them."""
    figure = Figure(figsize=(7.2, 4.6), dpi=150, layout="constrained")
    axes = figure.subplots()
    levels = comparison["levels"]
    for mode in MODES:
        mine = [
            (user, total, result["max_concurrency"])
            for level in levels
            for result, user, total in points([level])
            if result is level[mode]
        ]
        if mine:
            users, totals = [user for user, _, _ in mine], [total for _, total, _ in mine]
            axes.plot(users, totals, MARKERS[mode] + "-", color=COLOURS[mode], label=f"drafting {mode}", ms=5, lw=1.6)
            for user, total, concurrency in mine:
                axes.annotate(str(concurrency), (user, total), (5, 5), textcoords="offset points", fontsize=8,
                              color=COLOURS[mode])  # fmt: skip
    front = sorted((user, total) for result, user, total in points(levels) if result["on_pareto_front"])
    if front:
        axes.plot(*zip(*front, strict=True), color="#bbbbbb", lw=6, alpha=0.5, zorder=1, label="Pareto front")
        axes.legend(frameon=False)
    axes.margins(0.1)
    axes.set_xlabel("tokens/s per user (1 ÷ median TPOT)")
    axes.set_ylabel("output tokens/s, all users")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)
    axes.grid(color="#dddddd", lw=0.6)
    model = str(comparison["model_id"]).rstrip("/").split("/")[-1]
    title = f"{model}, {comparison['dataset_name']}; numbers: requests at a time"
    figure.suptitle(title, x=0.02, ha="left", parse_math=False)
    figure.savefig(path)
