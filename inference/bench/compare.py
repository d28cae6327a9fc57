"""Drafting off and on under the same load, at rising concurrency: ratios, the Pareto front, and its picture.

A ratio is on ÷ off. Tokens/s per user are 1 ÷ TPOT.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from datetime import datetime
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from inference.bench.options import BenchOptions
from inference.bench.run import LOAD_ONLY, Work, measure, without_details

MODES = ("off", "on")
STYLES: dict[str, Any] = {"off": {"color": "#d98a29", "marker": "s"}, "on": {"color": "#2f6db3", "marker": "o"}}
RATIOS = (
    "output_throughput", "total_token_throughput", "request_throughput", "tokens_per_second_per_user",
    "median_ttft_ms", "median_tpot_ms", "median_itl_ms", "median_e2el_ms", "p99_e2el_ms",
)  # fmt: skip
WARMUPS = 2  # of each server, unless --num-warmups says otherwise

Server = Callable[[], AbstractContextManager[str]]  # opened, it gives the base URL of a server that answers


def compare(options: BenchOptions, work: Work, servers: dict[str, Server], *, together: bool) -> dict[str, Any]:
    """Measures both servers at every concurrency. `together`: both run at the same time and take turns, so that a slow
    machine slows both; otherwise one after the other, which needs the memory of one."""
    levels = sorted(set(options.concurrencies))
    results: dict[tuple[str, int], dict[str, Any]] = {}

    def measure_at(mode: str, url: str, concurrency: int) -> None:
        cold = not any(measured == mode for measured, _ in results)
        warmups = (WARMUPS if options.num_warmups is None else options.num_warmups) if cold else 0
        changes = {"base_url": url, "max_concurrency": concurrency, "num_warmups": warmups}
        results[mode, concurrency] = measure(options.model_copy(update=changes), work)

    with ExitStack() as running:
        if together:
            urls = {mode: running.enter_context(servers[mode]()) for mode in MODES}
            for level in levels:
                for mode in MODES:
                    measure_at(mode, urls[mode], level)
        else:
            for mode in MODES:
                with servers[mode]() as url:
                    for level in levels:
                        measure_at(mode, url, level)
    compared = [_level(n, results["off", n], results["on", n], options.body.get("temperature") == 0) for n in levels]
    measured = list(points(compared))
    front = pareto_front([(user, total) for _, user, total in measured])
    for i, (result, *_) in enumerate(measured):
        result["on_pareto_front"] = i in front
    return {
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        "model_id": work.model_id,
        "dataset_name": options.dataset_name,
        **({"note": LOAD_ONLY} if options.load_only else {}),
        "levels": compared,
    }


def _level(concurrency: int, off: dict[str, Any], on: dict[str, Any], greedy: bool) -> dict[str, Any]:
    for result in (off, on):
        tpot = result.get("median_tpot_ms")
        result["tokens_per_second_per_user"] = 1000 / tpot if tpot else None
    ratios = {
        name: on[name] / off[name] if on.get(name) is not None and off.get(name) else None for name in RATIOS
    }  # fmt: skip
    level: dict[str, Any] = {"max_concurrency": concurrency, "ratios": ratios}
    if greedy:
        columns = (result[name] for result in (off, on) for name in ("generated_texts", "errors"))
        same = [a == b for a, a_error, b, b_error in zip(*columns, strict=True) if not (a_error or b_error)]
        level |= {"identical_outputs": sum(same), "compared_outputs": len(same)}
    return level | {"off": without_details(off), "on": without_details(on)}


def points(levels: Sequence[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], float, float]]:
    """(result, tokens/s per user, output tokens/s) of every measurement that has both."""
    for result in (level[mode] for level in levels for mode in MODES):
        if result["tokens_per_second_per_user"] is not None and result["completed"]:
            yield result, result["tokens_per_second_per_user"], result["output_throughput"]


def pareto_front(places: Sequence[tuple[float, float]]) -> list[int]:
    """Indices of the places for which no other is at least as good in both co-ordinates and better in one."""
    dominated = [any(b[0] >= a[0] and b[1] >= a[1] and b != a for b in places) for a in places]
    return [i for i, worse in enumerate(dominated) if not worse]


def draw(comparison: dict[str, Any], path: Path) -> None:
    """Tokens/s per user against output tokens/s: a curve with drafting, one without, and the front behind them."""
    figure = Figure(figsize=(7.2, 4.6), dpi=150, layout="constrained")
    axes = figure.subplots()
    levels = comparison["levels"]
    for mode in MODES:
        curve = [point for level in levels for point in points([level]) if point[0] is level[mode]]
        users, totals = [user for _, user, _ in curve], [total for *_, total in curve]
        axes.plot(users, totals, label=f"drafting {mode}", ms=5, lw=1.6, **STYLES[mode])
        for result, user, total in curve:
            axes.annotate(str(result["max_concurrency"]), (user, total), (5, 5), textcoords="offset points", fontsize=8)
    if front := sorted((user, total) for result, user, total in points(levels) if result["on_pareto_front"]):
        axes.plot(*zip(*front, strict=True), color="#bbbbbb", lw=6, alpha=0.5, zorder=1, label="Pareto front")
    axes.legend(frameon=False)
    axes.margins(0.1)
    axes.set(xlabel="tokens/s per user (1 ÷ median TPOT)", ylabel="output tokens/s, all users", xlim=(0, None),
             ylim=(0, None))  # fmt: skip
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)
    axes.grid(color="#dddddd", lw=0.6)
    model = str(comparison["model_id"]).rstrip("/").split("/")[-1]
    title = f"{model}, {comparison['dataset_name']}; numbers: concurrency"
    figure.suptitle(title, x=0.02, ha="left", parse_math=False)
    figure.savefig(path)
