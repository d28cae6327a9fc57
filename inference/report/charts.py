"""The report's figures, drawn by matplotlib in one palette, legend included.

`svg` puts one into the page, which inverts the images where it is dark; `pixels` is for trackers.
Every number drawn stands in the report."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from inference.report.measurement import ALL_WORKLOADS, PHASES
from inference.report.schema import AcceptanceReport

PALETTE = ("#0072b2", "#e69f00", "#00805e", "#b8508f", "#56b4e9", "#c9520a", "#7a5fb5", "#8a7a2c")
INK, GRID, GREY = "#23272e", "#e3e3de", "#b9bec6"
STYLE: Any = {
    "axes.axisbelow": True,
    "axes.edgecolor": GRID,
    "axes.grid": True,
    "axes.labelcolor": INK,
    "axes.labelsize": 9,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.constrained_layout.use": True,
    "font.size": 10,
    "grid.color": GRID,
    "legend.fontsize": 9,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "report",
    "text.color": INK,
    "text.parse_math": False,
    "xtick.color": INK,
    "xtick.major.size": 0,
    "ytick.color": INK,
    "ytick.major.size": 0,
}


def _figure(title: str, height: float, draw: Callable[[Axes], None]) -> Figure:
    """`draw` on the axes of a figure of its own. `height`: inches, at a width of 5.4."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(5.4, height), label=title)
        axes = figure.subplots()
        draw(axes)
        handles, labels = axes.get_legend_handles_labels()
        if len(labels) > 1:
            columns = 4 if sum(map(len, labels)) > 36 else 9
            figure.legend(
                handles,
                labels,
                loc="outside upper left",
                ncols=columns,
                handlelength=1.2,
                columnspacing=1.2,
            )
    return figure


def svg(figure: Figure) -> Markup:
    """An <img> with the figure as SVG inside it, and its title as the text in place of it."""
    with matplotlib.rc_context(STYLE), io.BytesIO() as buffer:
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
        encoded = base64.b64encode(buffer.getvalue()).decode()
    return Markup('<img alt="{}" src="data:image/svg+xml;base64,{}">').format(
        figure.get_label(), encoded
    )


def pixels(figure: Figure) -> np.ndarray:
    """The figure as uint8 [H, W, 3]."""
    figure.set_dpi(150)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()


def _rows(axes: Axes, names: Sequence[str]) -> None:
    """Workloads down the left side, the first on top, `all` in bold."""
    axes.set_yticks(range(len(names)), labels=list(names))
    axes.set_ylim(len(names) - 0.45, -0.55)
    axes.yaxis.grid(False)
    for label, name in zip(axes.get_yticklabels(), names, strict=True):
        label.set_fontweight("bold" if name == ALL_WORKLOADS else "normal")


@dataclass
class Bars:
    """One bar per row. `marks`: diamonds; `spreads`: whiskers (low, high). None where nothing was
    measured."""

    label: str
    colour: str
    values: Sequence[float | None]
    marks: Sequence[float | None] = ()
    spreads: Sequence[tuple[float, float] | None] = ()


def grouped(
    title: str, names: Sequence[str], series: Sequence[Bars], unit: str, mark_label: str
) -> Figure:
    """Horizontal bars in groups, each value in the margin on the right."""

    def draw(axes: Axes) -> None:
        thick = 0.8 / len(series)
        for index, bars in enumerate(series):
            places = np.arange(len(names)) + (index - (len(series) - 1) / 2) * thick
            values = np.array(
                bars.values, dtype=float
            )  # None becomes NaN, of which nothing is drawn
            axes.barh(places, values, height=0.85 * thick, color=bars.colour, label=bars.label)
            for place, value in zip(places, values, strict=True):
                text = "" if np.isnan(value) else f"{value:.2f}"
                axes.text(
                    1.02,
                    place,
                    text,
                    transform=axes.get_yaxis_transform(),
                    va="center",
                    color=bars.colour,
                )
            for place, spread in zip(places, bars.spreads, strict=False):
                if spread:
                    axes.plot(spread, [place, place], color=INK, linewidth=1.2, marker="|")
            if any(bars.marks):
                label = mark_label if bars is series[0] else None
                marks = np.array(bars.marks, dtype=float)
                axes.plot(
                    marks,
                    places,
                    "D",
                    markersize=5,
                    color="white",
                    markeredgecolor=INK,
                    label=label,
                )
        axes.axvline(1.0, color=INK, linewidth=0.8, linestyle=":")
        axes.set_xlabel(unit)
        _rows(axes, names)

    return _figure(title, 0.9 + len(names) * max(0.36, 0.24 * len(series)), draw)


def stacked(
    title: str,
    names: Sequence[str],
    fractions: Sequence[Sequence[float]],
    parts: Sequence[tuple[str, Any]],
) -> Figure:
    """Horizontal bars of 100 %: fractions [rows][parts] (a row may end early), parts of (label,
    colour)."""

    def draw(axes: Axes) -> None:
        starts = np.zeros(len(names))
        for index, (label, colour) in enumerate(parts):
            widths = np.array([row[index] if index < len(row) else 0.0 for row in fractions])
            drawn = axes.barh(
                range(len(names)), widths, left=starts, height=0.7, color=colour, label=label
            )
            writing = INK if np.dot(to_rgb(colour), (0.3, 0.6, 0.1)) > 0.5 else "white"
            texts = [f"{100 * width:.0f}" if width >= 0.07 else "" for width in widths]
            axes.bar_label(drawn, texts, label_type="center", color=writing, fontsize=9)
            starts += widths
        axes.set_xlim(0, 1)
        axes.set_xticks([0, 0.25, 0.5, 0.75, 1], labels=["0", "25", "50", "75", "100 %"])
        _rows(axes, names)

    return _figure(title, 0.9 + 0.36 * len(names), draw)


def lines(
    title: str,
    curves: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    x_label: str,
    limits: tuple[float | None, float | None],
    doublings: bool = False,
) -> Figure:
    """Curves by name, (x, y) of each; markers tell them apart without colour, and `all` is drawn in
    ink. `doublings`: x is logarithmic."""

    def draw(axes: Axes) -> None:
        for index, (name, (x, y)) in enumerate(curves.items()):
            bold = name == ALL_WORKLOADS
            marker = "osD^vPX*"[index % 8] if len(x) < 40 else None
            colour = INK if bold else PALETTE[index % len(PALETTE)]
            axes.plot(
                x,
                y,
                label=name,
                color=colour,
                marker=marker,
                markersize=4,
                linewidth=2.4 if bold else 1.4,
            )
        axes.set_ylim(*limits)
        if doublings:
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter(EngFormatter(places=0))
        else:
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel(x_label)

    return _figure(title, 3.0, draw)


def acceptance_bars(report: AcceptanceReport) -> Figure:
    """τ by workload, one bar per temperature, the expected τ as a diamond on it."""
    rows, series = report.workloads(), []
    for index, temperature in enumerate(report.temperatures()):
        cells = [report.cell(row, temperature) for row in rows]
        measured = [cell.acceptance_length if cell else None for cell in cells]
        expected = [
            cell.expected.acceptance_length if cell and cell.expected else None for cell in cells
        ]
        colour = PALETTE[(0, 5, 2, 6)[index % 4]]
        series.append(Bars(f"measured, T={temperature:g}", colour, measured, expected))
    return grouped(
        "Acceptance length by workload",
        rows,
        series,
        "tokens per verification round",
        "expected by replay",
    )


def speed_bars(report: AcceptanceReport, temperature: float) -> Figure | None:
    """Speedups at one temperature with 90 % whiskers, the cost model's limit as a diamond."""
    cells = report.cells_at(temperature)
    limits = [cell.limit_speedup for cell in cells]
    series = []
    for label, colour, marks, speedups in (
        ("vs drafting off", PALETTE[0], limits, [cell.speedup_vs_autoregressive for cell in cells]),
        (
            "vs transformers.generate",
            PALETTE[2],
            [],
            [cell.speedup_vs_transformers for cell in cells],
        ),
    ):
        if any(speedups):
            values = [speedup.value if speedup else None for speedup in speedups]
            ranges = [(speedup.low, speedup.high) if speedup else None for speedup in speedups]
            series.append(Bars(label, colour, values, marks, ranges))
    names, title = [cell.workload for cell in cells], f"Speedup by workload at T={temperature:g}"
    return grouped(title, names, series, "× faster", "limit vs drafting off") if series else None


def rate_lines(report: AcceptanceReport, temperature: float) -> Figure:
    """The conditional acceptance rate by draft position, one curve per workload."""
    curves = {}
    for cell in report.cells_at(temperature):
        rates = cell.conditional_acceptance_per_position
        curves[cell.workload] = (range(1, len(rates) + 1), rates)
    title = f"Conditional acceptance rate by draft position at T={temperature:g}"
    return lines(title, curves, "draft position k", (0, 1.02))


def phase_bars(report: AcceptanceReport, temperature: float) -> Figure | None:
    """Fractions of the wall time by phase."""
    shares = {
        cell.workload: cell.time_shares for cell in report.cells_at(temperature) if cell.time_shares
    }
    phases = (*PHASES, "other")
    fractions = [[of_cell[phase] for phase in phases] for of_cell in shares.values()]
    parts = list(zip(phases, (*PALETTE[: len(PHASES)], GREY), strict=True))
    return (
        stacked(f"Time by phase at T={temperature:g}", list(shares), fractions, parts)
        if shares
        else None
    )
