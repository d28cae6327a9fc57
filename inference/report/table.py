"""The acceptance report on a terminal, in 80 columns: a table of the cells, and the gates. It
computes no figure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from inference.report.cell import Cell
from inference.report.measurement import ALL_WORKLOADS, OUR_ENGINE
from inference.report.schema import AcceptanceReport, SuiteFacts


def print_report(report: AcceptanceReport, console: Console | None = None) -> None:
    """Print the cells of the report's own method by temperature, one engine under the other if
    there are several, the other methods' totals, every suite, and the gates."""
    console = console or Console()
    if any(cell.suite is None for cell in report.headline):
        console.print(acceptance_table(report))
    for facts in report.suites:
        for table in suite_tables(report.of_suite(facts.name)):
            console.print(table)
    for temperature in report.temperatures():
        cell = report.cell(ALL_WORKLOADS, temperature)
        if cell is not None and len(bins := cell.acceptance_by_text_position) > 1:
            shown = ", ".join(
                f"{b.start:,} to {b.stop - 1:,} {b.acceptance_length:.2f} ({b.rounds:,})"
                for b in bins
            )
            console.print(
                f"τ by position in the text at T={temperature:g} (rounds): {shown}", highlight=False
            )
    for name, modes, rows in report.thinking_modes():
        console.print(mode_table(name, modes, rows))
    if report.gates:
        console.print(gates_table(report))
    if (training := report.training) and training.gain_per_doubling is not None:
        console.print(
            "held-out τ over the last two doublings of the tokens seen"
            f" ({training.supervised_tokens:,}): {training.gain_per_doubling:+.3f} ±"
            f" {training.gain_standard_error:.3f} per doubling",
            highlight=False,
        )


def acceptance_table(report: AcceptanceReport) -> Table:
    """τ measured and expected, tokens/s with drafting and off, speedup, efficiency, sameness."""
    p = report.provenance
    table = _table(
        _title(report), "workload", "T", "τ", "expect.", "tok/s", "off", "speedup", "eff.", "same"
    )
    for temperature in report.temperatures():
        for workload in report.workloads():
            for engine in report.engines():
                cell, own = report.cell(workload, temperature, engine=engine), engine == p.engine
                if cell is not None:
                    bold = own and workload == ALL_WORKLOADS
                    table.add_row(
                        *_row(cell, workload if own else f"  in {engine}"),
                        style="bold" if bold else None,
                    )
        table.add_section()
    for cell in report.headline:
        if cell.workload == ALL_WORKLOADS and cell.method != p.drafter_method:
            table.add_row(*_row(cell, f"{ALL_WORKLOADS} ({cell.method})"), style="dim")
    return table


def suite_tables(report: AcceptanceReport) -> list[Table]:
    """Of a report of one suite: a row per category and one for all, with both definitions of τ;
    then the rates by position over all categories."""
    (facts,) = report.suites
    title = (
        f"{facts.name}: {_title(report)}\n{facts.conversations} of {facts.conversations_in_file}"
        f" conversations, up to {facts.max_tokens} tokens, thinking: {facts.thinking}"
    )
    lengths = _table(
        title, "category", "T", "requests", "τ pooled", "τ mean", "tok/s", "speedup", "same"
    )
    rates = _table(
        "acceptance by position, %", "", "T", *map(str, range(1, facts.num_speculative_tokens + 1))
    )
    for temperature in report.temperatures():
        for engine in report.engines():
            where = "" if engine == report.provenance.engine else f" in {engine}"
            for cell in (
                report.cell(workload, temperature, engine=engine) for workload in report.workloads()
            ):
                if cell is None:
                    continue
                lengths.add_row(
                    *_suite_row(cell, where),
                    style="bold" if cell.workload == ALL_WORKLOADS else None,
                )
                if cell.workload == ALL_WORKLOADS:
                    for name in ("joint", "conditional"):
                        values = getattr(cell, f"{name}_acceptance_per_position")
                        shown = ["-" if rate is None else f"{100 * rate:.1f}" for rate in values]
                        rates.add_row(f"{name}{where}", f"{temperature:g}", *shown)
        lengths.add_section()
    lengths.caption = "τ pooled: over verifications; τ mean: of requests. " + ", ".join(
        f"{Path(file.path).name}: SHA-256 {file.sha256[:12]}…" for file in facts.files
    )
    lengths.caption_justify = "left"
    return [lengths, rates]


def mode_table(
    name: str, modes: Sequence[SuiteFacts], rows: Sequence[Sequence[Cell | None]]
) -> Table:
    """Thinking modes side by side: τ pooled, τ mean and speedup of each workload."""
    heads = [f"{head} {facts.thinking}" for head in ("τ", "mean", "×") for facts in modes]
    table = _table(f"{name}: thinking modes side by side", "workload", "T", *heads)
    for row in rows:
        first = next(cell for cell in row if cell is not None)
        figures = [cell and cell.acceptance_length for cell in row]
        figures += [cell and cell.acceptance_length_macro for cell in row]
        figures += [cell and (s := cell.speedup_vs_autoregressive) and s.median for cell in row]
        shown = ["-" if figure is None else f"{figure:.2f}" for figure in figures]
        style = "bold" if first.workload == ALL_WORKLOADS else None
        table.add_row(first.workload, f"{first.temperature:g}", *shown, style=style)
    table.caption, table.caption_justify = (
        "τ: over verifications; mean: of requests; ×: speedup",
        "left",
    )
    return table


def _suite_row(cell: Cell, where: str) -> list[str]:
    rates, speedup = cell.tokens_per_second, cell.speedup_vs_autoregressive
    return [
        cell.workload + where,
        f"{cell.temperature:g}",
        str(cell.prompts),
        f"{cell.acceptance_length:.2f}",
        f"{cell.acceptance_length_macro:.2f}",
        f"{rates.speculative.median:.0f}" if rates else "-",
        f"{speedup.median:.2f}" if speedup else "-",
        _lossless(cell),
    ]


def _title(report: AcceptanceReport) -> str:
    p = report.provenance
    engine = "" if p.engine == OUR_ENGINE else f" in {p.engine}"
    return (
        f"{p.drafter_method} for {p.target_name}, K={p.num_speculative_tokens}, {p.dtype}{engine}"
    )


def _table(title: str, first: str, *headings: str) -> Table:
    table = Table(
        title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    table.add_column(first, overflow="fold")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _row(cell: Cell, name: str) -> list[str]:
    rates, speedup, cost = cell.tokens_per_second, cell.speedup_vs_autoregressive, cell.cost_model
    return [
        name,
        f"{cell.temperature:g}",
        f"{cell.acceptance_length:.2f}",
        f"{cell.expected.acceptance_length:.2f}" if cell.expected else "-",
        f"{rates.speculative.median:.0f}" if rates else "-",
        f"{rates.autoregressive.median:.0f}" if rates and rates.autoregressive else "-",
        f"{speedup.median:.2f} ({speedup.low:.2f}-{speedup.high:.2f})" if speedup else "-",
        f"{100 * cost.efficiency:.0f}%" if cost and cost.efficiency is not None else "-",
        _lossless(cell),
    ]


def _lossless(cell: Cell) -> str:
    if not cell.lossless:
        return "-"
    mismatches = sum(check.mismatches for check in cell.lossless)
    ties = sum(check.ties for check in cell.lossless)
    return f"NO {mismatches}" if mismatches else f"yes ~{ties}" if ties else "yes"


def gates_table(report: AcceptanceReport) -> Table:
    """Every gate with its bound, the figure reached and the verdict."""
    table = _table("gates", "figure", "reached", "demanded")
    table.add_column("", no_wrap=True)
    for gate in report.gates:
        bounds = [
            f"{sign} {bound:g}"
            for sign, bound in (("≥", gate.min), ("≤", gate.max))
            if bound is not None
        ]
        verdict = Text("passed", style="green") if gate.passed else Text("missed", style="bold red")
        table.add_row(gate.name, f"{gate.value:.4g}", ", ".join(bounds), verdict)
    return table
