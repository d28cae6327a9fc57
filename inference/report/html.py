"""report.html: the acceptance report as one self-contained page, for a person rather than a program.

Style, figures and numbers are inside the file, so it opens offline. The layout is `templates/report.html.j2`; the
figures are made by charts.py.
It computes no figure of its own: what it shows stands in the report or in the training history.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from pydantic import BaseModel, ConfigDict

from inference.report import charts
from inference.report.cell import ALL_WORKLOADS, Cell
from inference.report.schema import AcceptanceReport
from speculators.export.serving_commands import draftsmith_snippet, vllm_command


class TrainingPoint(BaseModel):
    """One line of the training history; what a point did not measure is None. Other keys are ignored."""

    model_config = ConfigDict(extra="ignore")

    step: int
    loss: float | None = None
    expected_acceptance_length: float | None = None
    alpha: list[float] | None = None  # acceptance rate per draft depth, teacher-forced


def write_html(
    report: AcceptanceReport,
    path: str | os.PathLike[str],
    history: Sequence[TrainingPoint | Mapping[str, Any]] | None = None,
) -> Path:
    """Render the report (and the training history, if there is one) to `path`."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render_html(report, history), encoding="utf-8")
    return path


def render_html(report: AcceptanceReport, history: Sequence[TrainingPoint | Mapping[str, Any]] | None = None) -> str:
    """The page as a string. `history`: TrainingPoints or mappings with their keys, in step order."""
    points = [point if isinstance(point, TrainingPoint) else TrainingPoint(**point) for point in history or ()]
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(number=_number, percent=_percent)
    template = environment.get_template("report.html.j2")
    return template.render(
        report=report,
        provenance=report.provenance,
        cards=headline_cards(report),
        temperatures=report.temperatures(),
        cells=[cell for temperature in report.temperatures() for cell in charts.cells_at(report, temperature)],
        sections=[_section(report, t) for t in report.temperatures() if charts.cells_at(report, t)],
        acceptance_bars=charts.acceptance_bars(report) if report.results else None,
        training=training_charts(points),
        other_methods=[cell for cell in report.results if _is_rival(report, cell)],
        lossless=_lossless_rows(report),
        serving=serving_snippets(report),
    )


def _number(value: float | None, digits: int = 2) -> str:
    return "—" if value is None else f"{value:,.{digits}f}"


def _percent(value: float | None, digits: int = 0) -> str:
    return "—" if value is None else f"{100 * value:.{digits}f} %"


def headline_cards(report: AcceptanceReport) -> list[dict[str, Any]]:
    """The figures a reader wants first: {label, value, unit, note, state, fill}.

    state: good, bad (a gate, or losslessness, says so) or plain; fill: 0…1, or None for no bar.
    """
    gates = {gate.name: gate.passed for gate in report.gates}
    cells = {t: cell for t in report.temperatures() if (cell := report.cell(ALL_WORKLOADS, t)) is not None}

    def state(*names: str) -> str:
        passed = [gates[name] for name in names if name in gates]
        return "plain" if not passed else "good" if all(passed) else "bad"

    cards = []
    for t, cell in cells.items():
        best = len(cell.num_accepted_tokens_per_pos) + 1
        note = f"of at most {best}" + (f" · expected {cell.expected.acceptance_length:.2f}" if cell.expected else "")
        cards.append(
            _card(f"Acceptance length, T={t:g}", f"{cell.acceptance_length:.2f}", "", note)
            | {"state": state(f"t{t:g}.acceptance_length"), "fill": cell.acceptance_length / best}
        )
    for t, cell in list(cells.items())[:1]:  # the lowest temperature speaks for speed; the rest is below
        cards.append(_speedup_card(t, cell) | {"state": state(f"t{t:g}.speedup_vs_autoregressive")})
        cards.append(_efficiency_card(t, cell) | {"state": state(f"t{t:g}.efficiency")})
    cards.append(_lossless_card(report))
    cards.append(_gap_card(report) | {"state": state("expected_measured_gap")})
    return cards


def _card(label: str, value: str = "—", unit: str = "", note: str = "not measured") -> dict[str, Any]:
    return {"label": label, "value": value, "unit": unit, "note": note, "state": "plain", "fill": None}


def _speedup_card(temperature: float, cell: Cell) -> dict[str, Any]:
    label, speedup, rates = f"Speedup, T={temperature:g}", cell.speedup_vs_autoregressive, cell.tokens_per_second
    if speedup is None or rates is None or rates.autoregressive is None:
        return _card(label, note="not timed")
    note = f"{rates.speculative.median:,.0f} against {rates.autoregressive.median:,.0f} tokens/s, same engine"
    return _card(label, f"{speedup.median:.2f}", "×", note)


def _efficiency_card(temperature: float, cell: Cell) -> dict[str, Any]:
    label, cost = f"Efficiency, T={temperature:g}", cell.cost_model
    if cost is None or cost.efficiency is None:
        return _card(label)
    note = f"of the {cost.limit_speedup:.2f}× that forwards alone allow"
    return _card(label, f"{100 * cost.efficiency:.0f}", "%", note) | {"fill": min(cost.efficiency, 1.0)}


def _lossless_card(report: AcceptanceReport) -> dict[str, Any]:
    mismatches = report.summary.get("lossless_mismatches")
    if mismatches is None:
        return _card("Lossless", note="not checked")
    checked = sum(row["check"].checked_prompts for row in _lossless_rows(report))
    ties = int(report.summary.get("lossless_ties", 0))
    note = f"{int(mismatches)} mismatches in {checked} comparisons" + (f", {ties} ties" if ties else "")
    return _card("Lossless", "no" if mismatches else "yes", "", note) | {"state": "bad" if mismatches else "good"}


def _gap_card(report: AcceptanceReport) -> dict[str, Any]:
    label, gap = "Expected vs measured", report.summary.get("expected_measured_gap")
    cells = [report.cell(ALL_WORKLOADS, temperature) for temperature in report.temperatures()]
    errors = [cell.expected.gap[1] for cell in cells if cell and cell.expected]
    if gap is None:
        return _card(label)
    note = f"replay of the drafted text against runtime, worst temperature · standard error {_percent(max(errors), 1)}"
    return _card(label, f"{100 * gap:.1f}", "%", note)


def _lossless_rows(report: AcceptanceReport) -> list[dict[str, Any]]:
    """The pooled checks of the report's own method."""
    cells = [report.cell(ALL_WORKLOADS, temperature) for temperature in report.temperatures()]
    return [{"temperature": cell.temperature, "check": check} for cell in cells if cell for check in cell.lossless]


def _is_rival(report: AcceptanceReport, cell: Cell) -> bool:
    return cell.workload == ALL_WORKLOADS and len(report.methods()) + len(report.engines()) > 2


def _section(report: AcceptanceReport, temperature: float) -> dict[str, Any]:
    """Figures and cells of the report's own method at one temperature; None for a figure without data."""
    return {
        "temperature": temperature,
        "cells": charts.cells_at(report, temperature),
        "speed": charts.speed_bars(report, temperature),
        "joint": charts.position_lines(report, temperature, "joint"),
        "conditional": charts.position_lines(report, temperature, "conditional"),
        "accepted": charts.accepted_bars(report, temperature),
        "phases": charts.phase_bars(report, temperature),
        "output": charts.output_lines(report, temperature),
    }


def training_charts(points: Sequence[TrainingPoint]) -> list[tuple[str, Any]]:
    """(title, figure) of the loss, the expected acceptance length and the acceptance rate of each depth."""
    depths = max((len(point.alpha or ()) for point in points), default=0)
    loss = [(p.step, p.loss) for p in points if p.loss is not None]
    tau = [(p.step, p.expected_acceptance_length) for p in points if p.expected_acceptance_length is not None]
    rates = {
        f"depth {depth + 1}": [(p.step, p.alpha[depth]) for p in points if len(p.alpha or ()) > depth]  # type: ignore[index]
        for depth in range(depths)
    }
    made = []
    for title, measured, limits in (
        ("Loss", {"loss": loss}, (0, None)),
        ("Expected acceptance length, held out", {"expected": tau}, (1, None)),
        ("Acceptance rate by draft depth", rates, (0, 1)),
    ):
        curves: dict[str, Any] = {
            name: tuple(zip(*values, strict=True)) for name, values in measured.items() if len(values) > 1
        }
        if curves:
            made.append((title, charts.lines(f"{title}, by step", curves, "step", limits)))
    return made


def serving_snippets(report: AcceptanceReport) -> list[tuple[str, str]]:
    """(title, text) of how to run this drafter: in vLLM, and here."""
    p = report.provenance
    options: dict[str, Any] = {"method": p.drafter_method, "num_speculative_tokens": p.num_speculative_tokens}
    if p.drafter_path:
        options = {"method": p.drafter_method, "model": p.drafter_path} | options
    else:
        options |= p.drafter_config
    return [("vLLM", vllm_command(p.target_name, options)), ("Draftsmith", draftsmith_snippet(p.target_name, options))]
