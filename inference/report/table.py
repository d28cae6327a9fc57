"""The acceptance report on a terminal, in 80 columns: a table of the cells, and the gates. It
computes no figure."""

from __future__ import annotations

from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from inference.report.cell import Cell
from inference.report.measurement import ALL_WORKLOADS, OUR_ENGINE
from inference.report.schema import AcceptanceReport


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
        if cell is not None and cell.drafted_share is not None and cell.drafted_share < 1:
            console.print(
                f"T={temperature:g}: drafted in {100 * cell.drafted_share:.0f} % of the rounds; τ"
                " is over these, /fwd (tokens per target forward) over all",
                highlight=False,
            )
        if cell is not None and len(bins := cell.acceptance_by_position) > 1:
            shown = ", ".join(
                f"{b.start:,} to {b.stop - 1:,} {b.acceptance_length:.2f} ({b.rounds:,})"
                for b in bins
            )
            console.print(
                f"τ by position in the text at T={temperature:g} (rounds): {shown}", highlight=False
            )
    for line in report.stalled_passes():
        console.print(f"stalled: {line}", style="yellow", highlight=False)
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
    """τ, tokens per forward, tokens/s with drafting and off, speedup, efficiency, same
    text."""
    p = report.provenance
    table = _table(
        _title(report),
        "workload",
        "T",
        "τ",
        "/fwd",
        "tok/s",
        "off",
        "speedup",
        "eff.",
        "same",
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


def _suite_row(cell: Cell, where: str) -> list[str]:
    rates = cell.tokens_per_second
    speedup = cell.speedup_vs_autoregressive
    return [
        cell.workload + where,
        f"{cell.temperature:g}",
        str(cell.prompts),
        f"{cell.acceptance_length:.2f}",
        f"{cell.acceptance_length_macro:.2f}",
        f"{rates.speculative.value:.1f}" if rates else "-",
        f"{speedup.value:.2f}" if speedup else "-",
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
    rates = cell.tokens_per_second
    speedup = cell.speedup_vs_autoregressive
    return [
        name,
        f"{cell.temperature:g}",
        f"{cell.acceptance_length:.2f}",
        "-" if cell.tokens_per_forward is None else f"{cell.tokens_per_forward:.2f}",
        f"{rates.speculative.value:.1f}" if rates else "-",
        f"{rates.autoregressive.value:.1f}" if rates and rates.autoregressive else "-",
        f"{speedup.value:.2f} ({speedup.low:.2f}-{speedup.high:.2f})" if speedup else "-",
        "-" if cell.efficiency is None else f"{100 * cell.efficiency:.0f}%",
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
