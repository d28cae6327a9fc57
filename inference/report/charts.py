"""The report's figures, drawn by matplotlib: each an image inside the page, legend included.

One palette serves light and dark pages; the page inverts the images where it is dark. Every number drawn stands in the
report.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from inference.report.cell import ALL_WORKLOADS, PHASES, Cell
from inference.report.schema import AcceptanceReport

PALETTE = ("#0072b2", "#e69f00", "#00805e", "#b8508f", "#56b4e9", "#c9520a", "#7a5fb5", "#8a7a2c")
INK, GRID, GREY = "#23272e", "#e3e3de", "#b9bec6"
STYLE: Any = {
    "axes.axisbelow": True, "axes.edgecolor": GRID, "axes.grid": True, "axes.labelcolor": INK, "axes.labelsize": 9,
    "axes.spines.right": False, "axes.spines.top": False, "figure.constrained_layout.use": True,
    "font.size": 10, "grid.color": GRID, "legend.fontsize": 9, "legend.frameon": False, "svg.fonttype": "none",
    "svg.hashsalt": "report", "text.color": INK, "text.parse_math": False, "xtick.color": INK, "xtick.major.size": 0,
    "ytick.color": INK, "ytick.major.size": 0,
}  # fmt: skip
FEWEST_ROUNDS = 20  # a stretch of the output with fewer rounds is noise, and left to the JSON


def _image(description: str, height: float, draw: Callable[[Axes], None]) -> Markup:
    """`draw` on axes of their own -> an <img> of inline SVG. `height`: inches, of a figure 5.4 wide."""
    with matplotlib.rc_context(STYLE), io.BytesIO() as buffer:
        figure = Figure(figsize=(5.4, height))
        axes = figure.subplots()
        draw(axes)
        handles, labels = axes.get_legend_handles_labels()
        if len(labels) > 1:
            wide = 4 if sum(map(len, labels)) > 36 else 9
            figure.legend(handles, labels, loc="outside upper left", ncols=wide, handlelength=1.2, columnspacing=1.2)
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
        encoded = base64.b64encode(buffer.getvalue()).decode()
    return Markup('<img alt="{}" src="data:image/svg+xml;base64,{}">').format(description, encoded)


def _rows(axes: Axes, names: Sequence[str]) -> None:
    """Workloads down the left side, the first on top, `all` in bold."""
    axes.set_yticks(range(len(names)), labels=list(names))
    axes.set_ylim(len(names) - 0.45, -0.55)
    axes.yaxis.grid(False)
    for label, name in zip(axes.get_yticklabels(), names, strict=True):
        label.set_fontweight("bold" if name == ALL_WORKLOADS else "normal")


def bars(
    description: str, names: Sequence[str], series: Sequence[Mapping[str, Any]], unit: str, mark_label: str
) -> Markup:
    """Horizontal bars in groups, each value in the margin on the right.

    A series has a label, a colour, values [rows] (None: not measured), marks [rows] or none, drawn as diamonds, and,
    optionally, spreads [rows] of (low, high), drawn as whiskers.
    """

    def draw(axes: Axes) -> None:
        thick = 0.8 / len(series)
        for index, one in enumerate(series):
            places = [row + (index - (len(series) - 1) / 2) * thick for row in range(len(names))]
            values = np.array(one["values"], dtype=float)  # None becomes NaN, of which nothing is drawn
            axes.barh(places, values, height=0.85 * thick, color=one["colour"], label=one["label"])
            for place, spread in zip(places, one.get("spreads", ()), strict=False):
                if spread:
                    axes.plot(spread, [place, place], color=INK, linewidth=1.2, marker="|")
            for place, value in zip(places, values, strict=True):
                told = "" if np.isnan(value) else f"{value:.2f}"
                axes.text(1.02, place, told, transform=axes.get_yaxis_transform(), va="center", color=one["colour"])
            if any(one["marks"]):
                label = mark_label if one is series[0] else None
                marks = np.array(one["marks"], dtype=float)
                axes.plot(marks, places, "D", markersize=5, color="white", markeredgecolor=INK, label=label)
        axes.axvline(1.0, color=INK, linewidth=0.8, linestyle=":")
        axes.set_xlabel(unit)
        _rows(axes, names)

    return _image(description, 0.9 + len(names) * max(0.36, 0.24 * len(series)), draw)


def stacked(
    description: str, names: Sequence[str], shares: Sequence[Sequence[float]], parts: Sequence[tuple[str, Any]]
) -> Markup:
    """Horizontal bars of 100 %: shares [rows][parts] (a row may end early), parts of (label, colour)."""

    def draw(axes: Axes) -> None:
        starts = [0.0] * len(names)
        for index, (label, colour) in enumerate(parts):
            widths = [row[index] if index < len(row) else 0.0 for row in shares]
            drawn = axes.barh(range(len(names)), widths, left=starts, height=0.7, color=colour, label=label)
            red, green, blue = to_rgb(colour)
            writing = INK if 0.3 * red + 0.6 * green + 0.1 * blue > 0.5 else "white"
            told = [f"{100 * width:.0f}" if width >= 0.07 else "" for width in widths]
            axes.bar_label(drawn, told, label_type="center", color=writing, fontsize=9)
            starts = [start + width for start, width in zip(starts, widths, strict=True)]
        axes.set_xlim(0, 1)
        axes.set_xticks([0, 0.25, 0.5, 0.75, 1], labels=["0", "25", "50", "75", "100 %"])
        _rows(axes, names)

    return _image(description, 0.9 + 0.36 * len(names), draw)


def lines(
    description: str,
    curves: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    x_label: str,
    limits: tuple[float | None, float | None],
) -> Markup:
    """Curves by name, (x, y) each; markers tell them apart without colour, and `all` is drawn in ink."""

    def draw(axes: Axes) -> None:
        for index, (name, (x, y)) in enumerate(curves.items()):
            bold = name == ALL_WORKLOADS
            marker = "osD^vPX*"[index % 8] if len(x) < 40 else None
            colour = INK if bold else PALETTE[index % len(PALETTE)]
            axes.plot(x, y, label=name, color=colour, marker=marker, markersize=4, linewidth=2.4 if bold else 1.4)
        axes.set_ylim(*limits)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel(x_label)

    return _image(description, 3.0, draw)


# ------------------------------------------------------------------ the report's own


def cells_at(report: AcceptanceReport, temperature: float) -> list[Cell]:
    """The report's own method at one temperature, workloads in order, `all` last."""
    cells = (report.cell(workload, temperature) for workload in report.workloads())
    return [cell for cell in cells if cell is not None]


def acceptance_bars(report: AcceptanceReport) -> Markup:
    """τ by workload, one bar per temperature, the expected τ as a diamond on it."""
    rows, series = report.workloads(), []
    for index, temperature in enumerate(report.temperatures()):
        cells = [report.cell(row, temperature) for row in rows]
        series.append(
            {
                "label": f"measured, T={temperature:g}",
                "colour": PALETTE[(0, 5, 2, 6)[index % 4]],
                "values": [cell.acceptance_length if cell else None for cell in cells],
                "marks": [cell.expected.acceptance_length if cell and cell.expected else None for cell in cells],
            }
        )
    return bars("Acceptance length by workload", rows, series, "tokens per verification round", "expected by replay")


def speed_bars(report: AcceptanceReport, temperature: float) -> Markup | None:
    """Speedups at one temperature with quartile whiskers, the cost model's limit as a diamond."""
    cells = cells_at(report, temperature)
    limits = [cell.cost_model.limit_speedup if cell.cost_model else None for cell in cells]
    series: list[dict[str, Any]] = []
    for name, label, colour, marks in (
        ("speedup_vs_autoregressive", "vs drafting off", PALETTE[0], limits),
        ("speedup_vs_transformers", "vs transformers.generate", PALETTE[2], []),
    ):
        spreads = [getattr(cell, name) for cell in cells]
        if any(spreads):
            medians = [spread.median if spread else None for spread in spreads]
            quartiles = [(spread.low, spread.high) if spread else None for spread in spreads]
            series.append(dict(label=label, colour=colour, values=medians, spreads=quartiles, marks=marks))
    names, title = [cell.workload for cell in cells], f"Speedup by workload at T={temperature:g}"
    return bars(title, names, series, "× faster", "limit vs drafting off") if series else None


def position_lines(report: AcceptanceReport, temperature: float, kind: str) -> Markup:
    """Acceptance rate by draft position, `kind` joint or conditional, one curve per workload."""
    rates = {c.workload: getattr(c, f"{kind}_acceptance_per_position") for c in cells_at(report, temperature)}
    curves = {name: (range(1, len(values) + 1), values) for name, values in rates.items()}
    return lines(
        f"{kind} acceptance rate by draft position at T={temperature:g}", curves, "draft position k", (0, 1.02)
    )


def accepted_bars(report: AcceptanceReport, temperature: float) -> Markup:
    """Share of the rounds by number of accepted drafts: grey for none, then ever deeper."""
    cells = cells_at(report, temperature)
    shares = [[count / max(cell.num_drafts, 1) for count in cell.histogram] for cell in cells]
    most = max(len(cell.histogram) for cell in cells) - 1
    shades = matplotlib.colormaps["Blues"]
    parts = [("0", GREY), *((str(j), shades(0.2 + 0.75 * j / most)) for j in range(1, most + 1))]
    return stacked(f"Accepted drafts per round at T={temperature:g}", [c.workload for c in cells], shares, parts)


def phase_bars(report: AcceptanceReport, temperature: float) -> Markup | None:
    """Share of the wall time by phase."""
    cells = [cell for cell in cells_at(report, temperature) if cell.time_shares]
    shares = [[getattr(cell.time_shares, phase) for phase in PHASES] for cell in cells]
    colours = {"other": GREY} | dict(zip((p for p in PHASES if p != "other"), PALETTE, strict=False))
    parts = [(phase, colours[phase]) for phase in PHASES]
    names = [cell.workload for cell in cells]
    return stacked(f"Time by phase at T={temperature:g}", names, shares, parts) if cells else None


def output_lines(report: AcceptanceReport, temperature: float) -> Markup | None:
    """τ along the output, of stretches with enough rounds."""
    curves = {}
    for cell in cells_at(report, temperature):
        bins = [each for each in cell.acceptance_by_output_position if each.rounds >= FEWEST_ROUNDS]
        if len(bins) > 1:
            middles = [(each.start + each.stop) / 2 for each in bins]
            curves[cell.workload] = (middles, [each.acceptance_length for each in bins])
    title = f"Acceptance length by output position at T={temperature:g}"
    best = report.provenance.num_speculative_tokens + 1
    return lines(title, curves, "output token index", (1, best)) if curves else None
