"""report.html: the acceptance report as one self-contained page, for a person rather than a
program.

Style, figures and numbers are inside the file, so it opens offline. The layout is
`templates/report.html.j2`. No number is computed here: all stand in the report."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import matplotlib
import numpy as np
from markupsafe import Markup
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from draftsmith.inference.report.schema import (
    ALL_WORKLOADS,
    AUTOREGRESSIVE,
    SPECULATIVE,
    AcceptanceReport,
    Cell,
)
from draftsmith.inference.report.table import COSTS, EVERY, cost_rows, notes, row, spread

PALETTE = ("#0072b2", "#e69f00", "#00805e", "#b8508f", "#56b4e9", "#c9520a", "#7a5fb5", "#8a7a2c")
INK = "#23272e"
GRID = "#e3e3de"
WIDTH = 5.4  # inches
LONGEST_LABEL = 24  # characters of a workload's name in a figure; the table has all of it
STYLE: Any = {
    "axes.axisbelow": True,
    "axes.edgecolor": GRID,
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.constrained_layout.use": True,
    "font.size": 10,
    "grid.color": GRID,
    "legend.fontsize": 9,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "report",
    "text.parse_math": False,
}


def render_html(report: AcceptanceReport) -> str:
    """The page as a string."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(figure=svg)
    with matplotlib.rc_context(STYLE):
        return environment.get_template("report.html.j2").render(
            report=report,
            provenance=report.provenance,
            cards=cards(report),
            columns=EVERY,
            rows=[
                (row(cell) | {"workload": cell.label}, cell.workload == ALL_WORKLOADS)
                for cell in report.results
            ],
            cost_columns=COSTS,
            cost_rows=cost_rows(report),
            notes=notes(report),
            figures=[speedup_bars(report), *position_lines(report)],
            checks=[(cell.temperature, c) for cell in report.pooled() for c in cell.lossless],
        )


# ------------------------------------------------------------------ cards


class Card(NamedTuple):
    """A figure at the top of the page, in words. `state`: good, bad, or neither."""

    label: str
    value: str
    note: str
    state: str = ""


def cards(report: AcceptanceReport) -> list[Card]:
    """The acceptance length and the speedup over all workloads by temperature, then whether the
    text is the same."""
    shown = []
    for cell in report.pooled():
        shown.append(_length_card(cell))
        shown.append(_speedup_card(cell))
    return [*shown, _same_text_card(report)]


def _length_card(cell: Cell) -> Card:
    note = f"of at most {len(cell.num_accepted_tokens_per_pos) + 1}"
    if cell.expected:
        note += f" · expected {cell.expected.acceptance_length:,.2f}"
    label = f"Acceptance length, T={cell.temperature:g}"
    return Card(label, f"{cell.acceptance_length:,.2f}", note)


def _speedup_card(cell: Cell) -> Card:
    label = f"Speedup, T={cell.temperature:g}"
    speedup = cell.speedup_vs_autoregressive
    if speedup is None:
        return Card(label, "—", "not timed")
    on = cell.tokens_per_second[SPECULATIVE].value
    off = cell.tokens_per_second[AUTOREGRESSIVE].value
    note = f"{spread(cell, speedup)} · {on:.1f} against {off:.1f} tokens/s"
    return Card(label, f"{speedup.value:,.2f}×", note)


def _same_text_card(report: AcceptanceReport) -> Card:
    label = "Same text as without drafting"
    if "lossless_mismatches" not in report.summary:
        return Card(label, "—", "not checked")
    mismatches = int(report.summary["lossless_mismatches"])
    ties = int(report.summary["lossless_ties"])
    compared = sum(check.checked_prompts for cell in report.pooled() for check in cell.lossless)
    note = f"{mismatches} mismatches, {ties} ties in {compared} comparisons"
    if mismatches:
        return Card(label, "no", note, "bad")
    return Card(label, "yes", note, "good")


# ------------------------------------------------------------------ figures


def svg(figure: Figure) -> Markup:
    """An <img> with the figure as SVG inside it, and its title as the text in place of it."""
    handles, labels = figure.axes[0].get_legend_handles_labels()
    if len(labels) > 1:
        columns = 4 if max(map(len, labels)) <= LONGEST_LABEL // 2 else 2
        figure.legend(handles, labels, loc="outside upper left", ncols=columns, handlelength=1.2)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    encoded = base64.b64encode(buffer.getvalue()).decode()
    return Markup('<img alt="{}" src="data:image/svg+xml;base64,{}">').format(
        figure.get_label(), encoded
    )


def speedup_bars(report: AcceptanceReport) -> Figure | None:
    """Speedup over drafting off by workload, a bar per temperature with 90 % whiskers, where the
    repeats are enough for an interval; None if nothing was timed."""
    workloads = report.workloads()
    temperatures = report.temperatures()
    timed = [
        (cell.temperature, workloads.index(cell.workload), speedup)
        for cell in report.own_cells()
        if (speedup := cell.speedup_vs_autoregressive)
    ]
    if not timed:
        return None
    height = 0.8 / len(temperatures)
    size = (WIDTH, 0.9 + len(workloads) * 0.3 * len(temperatures))
    figure = Figure(figsize=size, label="Speedup by workload")
    axes = figure.subplots()
    for index, temperature in enumerate(temperatures):
        speedups = {place: speedup for at, place, speedup in timed if at == temperature}
        values = np.array([s.value for s in speedups.values()])
        ends = [(s.low, s.high) for s in speedups.values() if s.low is not None]
        whiskers = np.abs(np.array(ends).T - values) if ends and len(ends) == len(values) else None
        bars = axes.barh(
            [place + (index - (len(temperatures) - 1) / 2) * height for place in speedups],
            values,
            height=0.85 * height,
            color=PALETTE[index % len(PALETTE)],
            label=f"T={temperature:g}",
            xerr=whiskers,
            error_kw={"ecolor": INK, "elinewidth": 1.0},
        )
        axes.bar_label(bars, fmt="%.2f", label_type="edge", padding=6)
    axes.axvline(1.0, color=INK, linewidth=0.8, linestyle=":")
    axes.set_xlabel("× faster than the same engine without drafting")
    axes.set_yticks(range(len(workloads)), labels=[*map(_label, workloads)])
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.yaxis.grid(False)
    return figure


def position_lines(report: AcceptanceReport) -> list[Figure]:
    """The conditional acceptance rate by draft position, one curve per workload, `all` in ink; a
    figure for each temperature."""
    figures = []
    for temperature in report.temperatures():
        title = f"Conditional acceptance by draft position, T={temperature:g}"
        figure = Figure(figsize=(WIDTH, 3.0), label=title)
        axes = figure.subplots()
        cells = [cell for cell in report.own_cells() if cell.temperature == temperature]
        for index, cell in enumerate(cells):
            bold = cell.workload == ALL_WORKLOADS
            rates = [r for r in cell.conditional_acceptance_per_position if r is not None]
            axes.plot(
                range(1, len(rates) + 1),
                rates,
                label=_label(cell.workload),
                color=INK if bold else PALETTE[index % len(PALETTE)],
                marker="osD^vPX*"[index % 8] if len(rates) < 40 else None,
                markersize=4,
                linewidth=2.4 if bold else 1.4,
            )
        axes.set_xlabel("draft position k")
        axes.set_ylim(0, 1.02)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        figures.append(figure)
    return figures


def _label(workload: str) -> str:
    """A workload's name in a figure, whose place a long one would take."""
    if len(workload) <= LONGEST_LABEL:
        return workload
    half = (LONGEST_LABEL - 1) // 2  # names often differ at their ends
    return f"{workload[:half]}…{workload[-half:]}"
