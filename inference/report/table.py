"""The acceptance report on a terminal, in 80 columns: a table of the cells, and the gates. It computes no figure."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from inference.report.cell import Cell
from inference.report.measurement import ALL_WORKLOADS, OUR_ENGINE
from inference.report.schema import AcceptanceReport


def print_report(report: AcceptanceReport, console: Console | None = None) -> None:
    """Print the cells of the report's own method by temperature, one engine under the other if there are several, the
    other methods' totals, and the gates."""
    console = console or Console()
    console.print(acceptance_table(report))
    if report.gates:
        console.print(gates_table(report))
    if (training := report.training) and training.gain_per_doubling is not None:
        console.print(
            f"held-out τ over the last two doublings of the tokens seen ({training.supervised_tokens:,}): "
            f"{training.gain_per_doubling:+.3f} ± {training.gain_standard_error:.3f} per doubling",
            highlight=False,
        )


def acceptance_table(report: AcceptanceReport) -> Table:
    """τ measured and expected, tokens/s with drafting and off, speedup, efficiency, sameness."""
    p = report.provenance
    engine = "" if p.engine == OUR_ENGINE else f" in {p.engine}"
    title = f"{p.drafter_method} for {p.target_name}, K={p.num_speculative_tokens}, {p.dtype}{engine}"
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("workload", overflow="fold")
    for heading in ("T", "τ", "expect.", "tok/s", "off", "speedup", "eff.", "same"):
        table.add_column(heading, justify="right", no_wrap=True)
    for temperature in report.temperatures():
        for workload in report.workloads():
            for engine in report.engines():
                cell, own = report.cell(workload, temperature, engine=engine), engine == p.engine
                if cell is not None:
                    bold = own and workload == ALL_WORKLOADS
                    table.add_row(*_row(cell, workload if own else f"  in {engine}"), style="bold" if bold else None)
        table.add_section()
    for cell in report.results:
        if cell.workload == ALL_WORKLOADS and cell.method != p.drafter_method:
            table.add_row(*_row(cell, f"{ALL_WORKLOADS} ({cell.method})"), style="dim")
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
    """The verdict on equality of outputs with and without drafting, with its mismatches or ties."""
    if not cell.lossless:
        return "-"
    mismatches = sum(check.mismatches for check in cell.lossless)
    ties = sum(check.ties for check in cell.lossless)
    return f"NO {mismatches}" if mismatches else f"yes ~{ties}" if ties else "yes"


def gates_table(report: AcceptanceReport) -> Table:
    """Every gate with its bound, the figure reached and the verdict."""
    table = Table(title="gates", title_justify="left", title_style="bold", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("figure", overflow="fold")
    for heading in ("reached", "demanded"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for gate in report.gates:
        bounds = [f"{sign} {bound:g}" for sign, bound in (("≥", gate.min), ("≤", gate.max)) if bound is not None]
        verdict = Text("passed", style="green") if gate.passed else Text("missed", style="bold red")
        table.add_row(gate.name, f"{gate.value:.4g}", ", ".join(bounds), verdict)
    return table
