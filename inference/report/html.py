"""report.html: the acceptance report as one self-contained page, for a person rather than a
program.

Style, figures and numbers are inside the file, so it opens offline. The layout is
`templates/report.html.j2`, the figures are drawn by charts.py. No number is computed here: all
stand in the report or in the training history."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from inference.report import charts
from inference.report.measurement import ALL_WORKLOADS
from inference.report.schema import AcceptanceReport, TrainingProgress
from speculators.export.serving_commands import draftsmith_snippet, vllm_command

FIGURES = {  # of each temperature, by their names in the template
    "speed": charts.speed_bars,
    "phases": charts.phase_bars,
    "conditional": charts.rate_lines,
}


History = Sequence[Mapping[str, Any]]  # the training loop's records, one per step


def write_html(
    report: AcceptanceReport, path: str | os.PathLike[str], history: History = ()
) -> Path:
    """Render the report (and the training history, if there is one) to `path`."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render_html(report, history), encoding="utf-8")
    return path


def render_html(report: AcceptanceReport, history: History = ()) -> str:
    """The page as a string. `history`: in step order."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(number=_number, percent=_percent, figure=charts.svg)
    temperatures = report.temperatures()
    drawn = [t for t in temperatures if report.cells_at(t)]
    pooled = [cell for t in temperatures if (cell := report.cell(ALL_WORKLOADS, t)) is not None]
    rivals = [cell for cell in report.headline if cell.workload == ALL_WORKLOADS]
    return environment.get_template("report.html.j2").render(
        report=report,
        provenance=report.provenance,
        summary=report.summary,
        gates={gate.name: gate.passed for gate in report.gates},
        temperatures=temperatures,
        cells=report.own_cells(),
        pooled=pooled,
        acceptance_bars=charts.acceptance_bars(report) if report.results else None,
        figures={
            name: [(t, made) for t in drawn if (made := draw(report, t))]
            for name, draw in FIGURES.items()
        },
        training=training_charts(history, report.training),
        progress=report.training,
        other_methods=rivals if len(report.methods()) + len(report.engines()) > 2 else [],
        suites=[report.of_suite(facts.name) for facts in report.suites],
        lossless=[(cell.temperature, check) for cell in pooled for check in cell.lossless],
        serving=serving_snippets(report),
    )


def _number(value: float | None, digits: int = 2) -> str:
    return "—" if value is None else f"{value:,.{digits}f}"


def _percent(value: float | None, digits: int = 0) -> str:
    return "—" if value is None else f"{100 * value:.{digits}f} %"


def training_charts(history: History, progress: TrainingProgress | None) -> list[tuple[str, Any]]:
    """(title, figure) of the loss, the acceptance rate of each depth and the expected acceptance
    length; the last over the tokens seen, where they are known."""
    loss, tau, rates = {}, {}, defaultdict(dict)
    for point in history:
        step = point["step"]
        loss[step], tau[step] = point.get("loss"), point.get("expected_acceptance_length")
        for depth, rate in enumerate(point.get("acceptance_rate") or (), 1):
            rates[f"depth {depth}"][step] = rate
    figures, held_out = [], progress.held_out if progress else []
    if len(held_out) > 1:
        curve = [p.supervised_tokens for p in held_out], [p.acceptance_length for p in held_out]
        title, tau = "Expected acceptance length, held out", {}
        made = charts.lines(
            f"{title}, by tokens seen", {"expected": curve}, "tokens with a loss", (1, None), True
        )
        figures.append((title, made))
    for title, curves, limits in (
        ("Loss", {"loss": loss}, (0, None)),
        ("Expected acceptance length, held out", {"expected": tau}, (1, None)),
        ("Acceptance rate by draft depth", rates, (0, 1)),
    ):
        measured = {
            name: {x: y for x, y in curve.items() if y is not None}
            for name, curve in curves.items()
        }
        drawn = {
            name: (list(curve), list(curve.values()))
            for name, curve in measured.items()
            if len(curve) > 1
        }
        if drawn:
            figures.append((title, charts.lines(f"{title}, by step", drawn, "step", limits)))
    return figures


def serving_snippets(report: AcceptanceReport) -> list[tuple[str, str]]:
    """(title, text) of how to run this drafter: in vLLM, and here."""
    p = report.provenance
    options: dict[str, Any] = {
        "method": p.drafter_method,
        "num_speculative_tokens": p.num_speculative_tokens,
    }
    if p.drafter_path:
        options = {"method": p.drafter_method, "model": p.drafter_path} | options
    else:
        options |= p.drafter_config
    return [
        ("vLLM", vllm_command(p.target_name, options)),
        ("Draftsmith", draftsmith_snippet(p.target_name, options)),
    ]
