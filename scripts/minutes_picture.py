"""The picture of scripts/minutes.py and of its peer: τ against the minutes and against the tokens
of a training, a line for each variant of several budgets; docs/results.md shows it."""

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
ALONE = "other variants, after one budget each"

Line = dict[str, list[tuple[float, float]]]  # (x, τ) by label, in order of x


def trainings(results: Mapping[str, Any], peers: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The runs of both files that judge by JUDGES, each with its `label`: family and variant, and
    where its hidden states come from if they are computed within the minutes; of the peer's, its
    name. Ours in the peer's file are there to be compared with it, and are left out, as are the
    runs of all machines but the one that has the most: minutes of two machines do not compare."""
    found = []
    ours = of_one_machine(list(results.get("runs", {}).values()))
    machines = {run["machine"] for run in ours}
    for run in ours:
        computed = "" if from_disk(run) else ", states computed"
        found.append({**run, "label": f"{run['family']}, {run['variant']}{computed}"})
    for budget, named in peers.get("runs", {}).items():
        if "speculators" in named and named["disk"]["machine"] in machines:
            minutes = float(budget.split()[0])  # behind it may stand the machine
            found.append({**named["speculators"], "minutes": minutes, "label": "speculators"})
    return [run for run in found if JUDGES.keys() <= run["judged"].keys()]


def of_one_machine(runs: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The runs of the machine that has the most; of equals, of the first."""
    counts = Counter(run["machine"] for run in runs)
    return [run for run in runs if run["machine"] == counts.most_common(1)[0][0]]


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


def picture(results: Mapping[str, Any], peers: Mapping[str, Any]) -> Figure:
    """τ against AXES for each of JUDGES; the figure's label is its text."""
    runs = trainings(results, peers)
    with matplotlib.rc_context(STYLE):
        title = "Expected acceptance length against minutes and tokens of a training"
        figure = Figure(figsize=(2 * WIDTH, 1.3 * WIDTH), label=title)
        for row, axes in zip(JUDGES, figure.subplots(2, 2, sharey="row"), strict=True):
            for x, panel in zip(AXES, axes, strict=True):
                draw(panel, lines(runs, x, row))
                panel.set_xlabel(AXES[x])
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
