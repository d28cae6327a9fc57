"""The pictures of scripts/minutes.py and of its peer: τ against the minutes and against the tokens
of a training, a line for each variant of several budgets, for each machine; docs/results.md shows
them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from draftsmith.inference.report.html import PALETTE, STYLE, WIDTH
from scripts.minutes import from_disk

# The judges that are drawn: prompts of the kind that was trained on, and others.
JUDGES = {"chat": "its own kind of prompts", "mt_bench": "MT-Bench"}
AXES = {"minutes": "minutes of one core", "tokens": "supervised tokens seen"}
MARKERS = "os^Dv<>P*X"
GREY = "#9a9a9a"
ALONE = "others, after one budget each"

Line = dict[str, list[tuple[float, float]]]  # (x, τ) by label, in order of x


def machines(results: Mapping[str, Any]) -> list[str]:
    """The machines whose minutes are drawn, the one of most runs first: minutes and texts of two
    do not compare. A machine all of whose trainings have one budget has no line to draw."""
    runs = results.get("runs", {}).values()
    counts = Counter(run["machine"] for run in runs)
    several = {(run["machine"], label(run), run["minutes"]) for run in runs}
    budgets = Counter((machine, name) for machine, name, _ in several)
    drawn = {machine for (machine, _), count in budgets.items() if count > 1}
    return [machine for machine, _ in counts.most_common() if machine in drawn]


def label(run: Mapping[str, Any]) -> str:
    """Of one of our runs: family and variant, and where its hidden states come from if they are
    computed within the minutes."""
    computed = "" if from_disk(run) else ", states computed"
    return f"{run['family']}, {run['variant']}{computed}"


def trainings(
    results: Mapping[str, Any], peers: Mapping[str, Any], machine: str
) -> list[Mapping[str, Any]]:
    """The runs of a machine in both files that judge by JUDGES, each with its `label`; of the
    peer's, its name. Ours in the peer's file are there to be compared with it, and are left out."""
    ours = [run for run in results["runs"].values() if run["machine"] == machine]
    drawn = [{**run, "label": label(run)} for run in ours]
    for budget, named in peers.get("runs", {}).items():
        if "speculators" in named and named["disk"]["machine"] == machine:
            minutes = float(budget.split()[0])  # behind it may stand the machine
            variant = named["disk"]["variant"]  # of the responses that both have
            name = "speculators" if variant == "default" else f"speculators, {variant}"
            drawn.append({**named["speculators"], "minutes": minutes, "label": name})
    return [run for run in drawn if JUDGES.keys() <= run["judged"].keys()]


def lines(runs: Sequence[Mapping[str, Any]], x: str, judge: str) -> Line:
    """The points of a panel: the means over the seeds of a label and budget."""
    groups: dict[str, dict[float, list[tuple[float, float]]]] = {}
    for run in runs:
        point = (run[x], run["judged"][judge]["tau"])
        groups.setdefault(run["label"], {}).setdefault(run["minutes"], []).append(point)
    return {
        label: [mean_point(budgets[budget]) for budget in sorted(budgets)]
        for label, budgets in groups.items()
    }


def mean_point(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The mean of points, in both coordinates."""
    xs, ys = zip(*points, strict=True)
    return sum(xs) / len(xs), sum(ys) / len(ys)


def pictures(results: Mapping[str, Any], peers: Mapping[str, Any]) -> list[Figure]:
    """One for each of `machines`."""
    return [picture(trainings(results, peers, name), name) for name in machines(results)]


def picture(runs: Sequence[Mapping[str, Any]], machine: str) -> Figure:
    """τ against AXES for each of JUDGES; the figure's label is its text."""
    with matplotlib.rc_context(STYLE):
        title = f"Expected acceptance length against minutes and tokens of a training, {machine}"
        figure = Figure(figsize=(2 * WIDTH, 1.3 * WIDTH), label=title)
        for row, axes in zip(JUDGES, figure.subplots(2, 2, sharey="row"), strict=True):
            for x, panel in zip(AXES, axes, strict=True):
                draw(panel, lines(runs, x, row))
                unit = f" ({machine})" if x == "minutes" else ""
                panel.set_xlabel(AXES[x] + unit)
            axes[0].set_ylabel(f"τ, {JUDGES[row]}")
    return figure


def draw(axes: Axes, points: Line) -> None:
    """A panel: a line for each label of several points, and the labels of one point as a cloud."""
    alone = [along[0] for along in points.values() if len(along) == 1]
    if alone:
        xs, ys = zip(*alone, strict=True)
        axes.scatter(xs, ys, s=14, color=GREY, label=ALONE)
    drawn = {label: along for label, along in points.items() if len(along) > 1}
    for index, (label, along) in enumerate(drawn.items()):
        xs, ys = zip(*along, strict=True)
        color = PALETTE[index % len(PALETTE)]
        marker = MARKERS[index // len(PALETTE) % len(MARKERS)]
        axes.plot(xs, ys, marker=marker, color=color, label=label)
    axes.set_xlim(left=0)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
