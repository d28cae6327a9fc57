"""The report's figures: matplotlib panels as inline SVG that takes its colours and fonts from the page.

Every colour is drawn as a sentinel hex value and replaced by a CSS variable afterwards, so one file serves
light and dark; text stays text. Sizes are in CSS pixels (matplotlib's point). Legends belong to the page, not
to the figures.

It must not know how the page is laid out, nor compute any acceptance number: it draws what the report says.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import Any

from markupsafe import Markup
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from inference.report import AcceptanceReport
from inference.report_cell import ALL_WORKLOADS, PHASES, Cell

NAMES = ("ink", "muted", "grid", "panel", "on", "on-pale", *(f"c{i}" for i in range(8)))
COLOURS = {name: f"#0{index:x}0{index:x}a{index:x}" for index, name in enumerate(NAMES)}  # sentinels, never shown
PALE = ("c1", "c4", "c7")  # fills that want dark writing in both themes
MARKERS = "osD^vPX*"
PHASE_COLOURS = dict(zip(PHASES, ("c1", "c0", "c4", "c2", "c3", "c6", "muted"), strict=True))
TEMPERATURE_COLOURS = ("c0", "c5", "c2", "c6")
WIDTH = 480  # CSS pixels of one panel


def workload_style(report: AcceptanceReport) -> dict[str, tuple[str, str]]:
    """Colour name and marker of every workload; `all` is drawn in ink."""
    styles = {}
    for index, name in enumerate(n for n in report.workloads() if n != ALL_WORKLOADS):
        styles[name] = (f"c{index % 8}", MARKERS[index % len(MARKERS)])
    return styles | ({ALL_WORKLOADS: ("ink", "o")} if ALL_WORKLOADS in report.workloads() else {})


def _panel(height: int, left: int, right: int = 16, top: int = 12, bottom: int = 40) -> tuple[Figure, Axes]:
    """One set of axes with margins in pixels."""
    figure = Figure(figsize=(WIDTH / 72, height / 72), dpi=72)
    FigureCanvasSVG(figure)
    figure.patch.set_alpha(0)
    box = (left / WIDTH, bottom / height, (WIDTH - left - right) / WIDTH, (height - top - bottom) / height)
    axes = figure.add_axes(box)
    axes.patch.set_alpha(0)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(COLOURS["grid"])
    axes.tick_params(colors=COLOURS["muted"], length=0, pad=6, labelsize=12)
    axes.set_axisbelow(True)
    return figure, axes


def _svg(figure: Figure, name: str, description: str) -> Markup:
    """The figure as inline SVG: no prolog, metadata or addresses, own ids, the page's colours and font."""
    buffer = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'\s(?:xmlns(?::\w+)?|version)="[^"]*"', "", text)
    text = re.sub(
        r'(<svg)[^>]*?(viewBox="[^"]*")[^>]*>',
        rf'\1 \2 role="img" aria-label="{description}">',
        text,
        count=1,
    )
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", text)
    text = re.sub(r"font-family: [^;\"]+", "font-family: var(--sans)", text)
    text = re.sub(r"font: ([^;\"]*?px) [^;\"]+", r"font: \1 var(--sans)", text)
    for colour, sentinel in COLOURS.items():
        text = text.replace(sentinel, f"var(--{colour})")
    return Markup(text)


def _categories(axes: Axes, names: Sequence[str]) -> None:
    """Workload names down the left side, first on top, `all` in bold."""
    axes.set_yticks(range(len(names)), labels=list(names))
    axes.set_ylim(len(names) - 0.45, -0.55)
    for label in axes.get_yticklabels():
        label.set_parse_math(False)  # a workload may be called $x$
        label.set_color(COLOURS["ink"])
        label.set_fontweight("bold" if label.get_text() == ALL_WORKLOADS else "normal")
    axes.spines["left"].set_visible(False)


def _margin(names: Sequence[str]) -> int:
    return min(190, 18 + int(6.6 * max((len(name) for name in names), default=0)))


def _whisker(axes: Axes, low: float, high: float, y: float) -> None:
    axes.plot([low, high], [y, y], color=COLOURS["ink"], linewidth=1.4, solid_capstyle="butt")
    axes.plot([low, high], [y, y], linestyle="", marker="|", markersize=7, color=COLOURS["ink"])


def _on(colour: str) -> str:
    """The colour to write with on a fill."""
    return "on-pale" if colour in PALE else "on"


def _furthest(series: Sequence[dict[str, Any]]) -> float:
    """The largest value, mark or whisker end; 1 if there is none."""
    reached = [v for each in series for key in ("values", "marks") for v in each.get(key, ()) if v is not None]
    reached += [spread[1] for each in series for spread in each.get("spreads", ()) if spread is not None]
    return max(reached, default=0.0) or 1.0


def bars(name: str, description: str, rows: Sequence[str], series: Sequence[dict[str, Any]], unit: str) -> Markup:
    """Horizontal grouped bars, the value written at the foot of each.

    Each series: colour, values [rows] (None = not measured) and, optionally, spreads [rows] of (low, high)
    drawn as whiskers and marks [rows] drawn as diamonds.
    """
    thick = 0.8 / max(len(series), 1)
    figure, axes = _panel(62 + len(rows) * max(30, 20 * len(series)), _margin(rows), right=24, bottom=42)
    furthest = _furthest(series)
    short = 38 / (WIDTH - _margin(rows) - 24) * furthest  # a bar too short to be written in
    for index, each in enumerate(series):
        for row, value in enumerate(each["values"]):
            if value is None:
                continue
            y = row + (index - (len(series) - 1) / 2) * thick
            axes.barh(y, value, height=thick * 0.82, color=COLOURS[each["colour"]], linewidth=0)
            spread = each.get("spreads", [None] * len(rows))[row]
            mark = each.get("marks", [None] * len(rows))[row]
            if spread is not None:
                _whisker(axes, spread[0], spread[1], y)
            if mark is not None:
                axes.plot(
                    mark, y, marker="D", markersize=6, color=COLOURS["panel"], markeredgecolor=COLOURS["ink"],
                    markeredgewidth=1.4,
                )  # fmt: skip
            inside = value > short
            place = 0.0 if inside else max(value, mark or 0.0, spread[1] if spread else 0.0)
            colour = COLOURS[_on(each["colour"]) if inside else "ink"]
            axes.annotate(
                f"{value:.2f}", (place, y), xytext=(7, 0), textcoords="offset points", va="center_baseline",
                fontsize=11, fontweight="bold" if rows[row] == ALL_WORKLOADS else "normal", color=colour,
            )  # fmt: skip
    axes.set_xlim(0, furthest * 1.04)
    axes.xaxis.grid(True, color=COLOURS["grid"], linewidth=1)
    axes.axvline(1.0, color=COLOURS["muted"], linewidth=1.2, linestyle=(0, (3, 3)), zorder=0.6)
    axes.set_xlabel(unit, color=COLOURS["muted"], fontsize=11, labelpad=6)
    _categories(axes, rows)
    return _svg(figure, name, description)


def stacked(
    name: str,
    description: str,
    rows: Sequence[str],
    shares: Sequence[Sequence[float]],
    fills: Sequence[tuple[str, float]],
) -> Markup:
    """Horizontal bars of 100 %: shares [rows][parts], fills [parts] of (colour, opacity)."""
    figure, axes = _panel(36 + 30 * len(rows), _margin(rows), right=22, top=4, bottom=28)
    for row, parts in enumerate(shares):
        start = 0.0
        for share, (colour, opacity) in zip(parts, fills, strict=True):
            axes.barh(row, share, left=start, height=0.7, color=COLOURS[colour], alpha=opacity, linewidth=0)
            if share >= 0.07:
                ink = _on(colour) if opacity > 0.6 and colour != "muted" else "ink"
                axes.text(
                    start + share / 2, row, f"{100 * share:.0f}", ha="center", va="center_baseline",
                    fontsize=11, color=COLOURS[ink],
                )  # fmt: skip
            start += share
    axes.set_xlim(0, 1)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1], labels=["0", "25", "50", "75", "100 %"])
    _categories(axes, rows)
    return _svg(figure, name, description)


def lines(
    name: str, description: str, curves: Sequence[dict[str, Any]], *, x_label: str, y_limits: tuple[float |
    None, float | None], integer_x: bool = False, height: int = 270,
) -> Markup:  # fmt: skip
    """Curves {x, y, colour, marker, bold}: markers tell them apart without colour."""
    figure, axes = _panel(height, 36, bottom=42)
    for curve in curves:
        bold = curve.get("bold", False)
        axes.plot(
            curve["x"], curve["y"], color=COLOURS[curve["colour"]], linewidth=2.8 if bold else 1.6,
            marker=curve.get("marker"), markersize=6.5 if bold else 5.5, markeredgewidth=0, zorder=3 if bold
            else 2, linestyle=curve.get("linestyle", "-"), clip_on=False,
        )  # fmt: skip
    axes.set_ylim(*y_limits)
    if integer_x:
        axes.set_xticks(sorted({x for curve in curves for x in curve["x"]}))
    axes.yaxis.grid(True, color=COLOURS["grid"], linewidth=1)
    axes.spines["left"].set_visible(False)
    axes.set_xlabel(x_label, color=COLOURS["muted"], fontsize=11, labelpad=6)
    return _svg(figure, name, description)


def cells_at(report: AcceptanceReport, temperature: float) -> list[Cell]:
    """The report's own method at one temperature, workloads in order, `all` last."""
    cells = (report.cell(workload, temperature) for workload in report.workloads())
    return [cell for cell in cells if cell is not None]


def acceptance_bars(report: AcceptanceReport) -> Markup:
    """τ by workload, one bar per temperature, the expected τ as a diamond on it."""
    rows = report.workloads()
    series = []
    for index, temperature in enumerate(report.temperatures()):
        cells = [report.cell(row, temperature) for row in rows]
        series.append(
            {
                "colour": TEMPERATURE_COLOURS[index % len(TEMPERATURE_COLOURS)],
                "values": [cell.acceptance_length if cell else None for cell in cells],
                "marks": [cell.expected.acceptance_length if cell and cell.expected else None for cell in cells],
            }
        )
    return bars("tau", "Acceptance length by workload", rows, series, "tokens per verification round")


def speed_bars(report: AcceptanceReport, temperature: float) -> Markup | None:
    """Speedups at one temperature with quartile whiskers, the cost model's limit as a diamond."""
    cells = cells_at(report, temperature)
    series = []
    for name, colour in (("speedup_vs_autoregressive", "c0"), ("speedup_vs_transformers", "c2")):
        spreads = [getattr(cell, name) for cell in cells]
        if not any(spreads):
            continue
        each = {
            "colour": colour,
            "values": [spread.median if spread else None for spread in spreads],
            "spreads": [(spread.low, spread.high) if spread else None for spread in spreads],
        }
        if name == "speedup_vs_autoregressive":
            each["marks"] = [cell.cost_model.limit_speedup if cell.cost_model else None for cell in cells]
        series.append(each)
    if not series:
        return None
    rows = [cell.workload for cell in cells]
    return bars(f"speed{temperature:g}", f"Speedup by workload at T={temperature:g}", rows, series, "× faster")


def position_lines(report: AcceptanceReport, temperature: float, kind: str) -> Markup:
    """Acceptance rate by draft position, `kind` joint or conditional, one curve per workload."""
    styles = workload_style(report)
    curves = []
    for cell in cells_at(report, temperature):
        rates = getattr(cell, f"{kind}_acceptance_per_position")
        colour, marker = styles[cell.workload]
        curves.append(
            {"x": list(range(1, len(rates) + 1)), "y": rates, "colour": colour, "marker": marker}
            | {"bold": cell.workload == ALL_WORKLOADS}
        )
    return lines(
        f"{kind}{temperature:g}", f"{kind} acceptance rate by draft position at T={temperature:g}", curves,
        x_label="draft position k", y_limits=(0, 1), integer_x=True,
    )  # fmt: skip


def accepted_fills(positions: int) -> list[tuple[str, float]]:
    """Fill of 0…K accepted drafts: grey for none, then ever deeper."""
    return [("muted", 0.35), *(("c0", 0.2 + 0.8 * (j / positions) ** 1.3) for j in range(1, positions + 1))]


def accepted_bars(report: AcceptanceReport, temperature: float) -> Markup:
    """Share of the rounds by number of accepted drafts."""
    cells = cells_at(report, temperature)
    shares = [[count / max(cell.num_drafts, 1) for count in cell.histogram] for cell in cells]
    fills = accepted_fills(max(len(cell.histogram) for cell in cells) - 1)
    title = f"Accepted drafts per round at T={temperature:g}"
    return stacked(f"hist{temperature:g}", title, [cell.workload for cell in cells], shares, fills)


def phase_bars(report: AcceptanceReport, temperature: float) -> Markup | None:
    """Share of the wall time by phase."""
    cells = [cell for cell in cells_at(report, temperature) if cell.time_shares]
    if not cells:
        return None
    shares = [[getattr(cell.time_shares, phase) for phase in PHASES] for cell in cells]
    fills = [(PHASE_COLOURS[phase], 0.55 if phase == "other" else 1.0) for phase in PHASES]
    title = f"Time by phase at T={temperature:g}"
    return stacked(f"time{temperature:g}", title, [cell.workload for cell in cells], shares, fills)


def output_lines(report: AcceptanceReport, temperature: float, fewest_rounds: int = 20) -> Markup | None:
    """τ along the output. Bins with fewer than `fewest_rounds` rounds are noise and left to the JSON."""
    styles = workload_style(report)
    curves = []
    for cell in cells_at(report, temperature):
        bins = [each for each in cell.acceptance_by_output_position if each.rounds >= fewest_rounds]
        if len(bins) > 1:
            colour, marker = styles[cell.workload]
            middle = [(each.start + each.stop) / 2 for each in bins]
            tau = [each.acceptance_length for each in bins]
            bold = cell.workload == ALL_WORKLOADS
            curves.append({"x": middle, "y": tau, "colour": colour, "marker": marker, "bold": bold})
    if not curves:
        return None
    best = report.provenance.num_speculative_tokens + 1
    title = f"Acceptance length by output position at T={temperature:g}"
    return lines(f"output{temperature:g}", title, curves, x_label="output token index", y_limits=(1, best))
