"""The rows of the acceptance report, and the terminal's tables of them, in 80 columns. The page and
the model card show the same rows. It computes no figure."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from draftsmith.inference.report.round_cost import why_slower
from draftsmith.inference.report.schema import (
    ALL_WORKLOADS,
    AUTOREGRESSIVE,
    OUR_ENGINE,
    SPECULATIVE,
    AcceptanceReport,
    Cell,
    Estimate,
)
from draftsmith.inference.report.speed import (
    LEAST_REPEATS,
    Stall,
    how_rounds_ran,
    num_repeats,
    stalled,
)

NONE = "-"  # not measured
COLUMNS = ("workload", "T", "n", "τ", "τ mean", "tok/s", "off", "speedup", "same")
EVERY = (
    *("workload", "engine", "T", "n", "τ", "τ mean", "expected", "/fwd"),
    *("tok/s", "off", "speedup", "same"),
)
COSTS = ("verification", "draft", "head", "sampling", "rest", "even at τ", "τ")
COSTS_TITLE = "where a round's time goes, in plain decoding steps"
Row = dict[str, str]


def row(cell: Cell) -> Row:
    """A cell in words, by column."""
    rates = {kind: f"{rate.value:.1f}" for kind, rate in cell.tokens_per_second.items()}
    speedup = cell.speedup_vs_autoregressive
    expected = cell.expected
    drafted = cell.num_drafts > 0
    return {
        "workload": cell.workload,
        "engine": cell.engine,
        "T": f"{cell.temperature:g}",
        "n": str(cell.prompts),
        "τ": f"{cell.acceptance_length:.2f}" if drafted else NONE,
        "τ mean": f"{cell.acceptance_length_macro:.2f}" if drafted else NONE,
        "expected": (
            f"{expected.acceptance_length:.2f} ({100 * expected.relative_difference:+.1f} ±"
            f" {100 * expected.standard_error:.1f} %)"
            if expected
            else NONE
        ),
        "drafted": f"{100 * cell.num_drafts / cell.num_rounds:.0f}%" if cell.num_rounds else NONE,
        "/fwd": f"{cell.tokens_per_forward:.2f}",
        "tok/s": rates.get(SPECULATIVE, NONE),
        "off": rates.get(AUTOREGRESSIVE, NONE),
        "speedup": f"{speedup.value:.2f} ({spread(cell, speedup)})" if speedup else NONE,
        "same": _same_text(cell),
    }


def spread(cell: Cell, estimate: Estimate) -> str:
    """The interval of an estimate of the cell, or the passes that are too few for one."""
    if estimate.low is None or estimate.high is None:
        return "one pass" if num_repeats(cell.passes) == 1 else "two passes"
    return f"{estimate.low:.2f}-{estimate.high:.2f}"


def _same_text(cell: Cell) -> str:
    if not cell.lossless:
        return NONE
    mismatches = sum(check.mismatches for check in cell.lossless)
    ties = sum(check.ties for check in cell.lossless)
    if mismatches:
        return f"NO {mismatches}"
    return f"yes ~{ties}" if ties else "yes"


def cost_row(cell: Cell) -> list[str]:
    """Where the time of a round goes, by COSTS; the cell has a `round_cost`."""
    cost = cell.round_cost
    assert cost is not None
    numbers = [
        *(cost.verification, cost.draft_forward, cost.draft_head, cost.sampling, cost.rest),
        *(cost.break_even_acceptance_length, cell.acceptance_length),
    ]
    return [NONE if number is None else f"{number:.2f}" for number in numbers]


def cost_rows(report: AcceptanceReport) -> list[list[str]]:
    """The temperature and `cost_row` of every pooled cell that has one."""
    return [
        [f"T={cell.temperature:g}", *cost_row(cell)] for cell in report.pooled() if cell.round_cost
    ]


def cost_table(cells: Iterable[tuple[str, Cell]]) -> Table:
    """A row for each name and its cell, which has a `round_cost`."""
    table = new_table(COSTS_TITLE, "", *COSTS)
    for name, cell in cells:
        table.add_row(name, *cost_row(cell))
    return table


def position_rows(cells: Iterable[Cell]) -> list[list[str]]:
    """Acceptance by position of the draft in per cent: name, temperature, then a value each."""
    return [
        [
            name,
            f"{cell.temperature:g}",
            *(NONE if rate is None else f"{100 * rate:.1f}" for rate in rates),
        ]
        for cell in cells
        for name, rates in (
            ("joint", cell.joint_acceptance_per_position),
            ("conditional", cell.conditional_acceptance_per_position),
        )
    ]


def _positions(report: AcceptanceReport) -> list[str]:
    """Headings of `position_rows`: of trees there are as many positions as levels."""
    most = max(len(cell.num_accepted_tokens_per_pos) for cell in report.pooled())
    return [str(position) for position in range(1, most + 1)]


def suite_notes(report: AcceptanceReport) -> list[str]:
    """What the results of each suite depend on, a sentence each."""
    return [
        f"{suite.name}: {suite.conversations} of {suite.conversations_in_file} conversations,"
        f" {suite.conversations_without_room} without room; later turns follow the live answers;"
        f" responses of up to {suite.max_tokens} tokens, K = {suite.num_speculative_tokens}"
        + "".join(f", {name}: {value}" for name, value in suite.chat_template_kwargs.items())
        + f"; {Path(suite.path).name}: SHA-256 {suite.sha256}"
        for suite in report.suites
    ]


def notes(report: AcceptanceReport) -> list[str]:
    """What the rows do not say, a sentence each."""
    lines = []
    for cell in report.pooled():
        temperature = f"T={cell.temperature:g}"
        if cell.num_drafts < cell.num_rounds:
            share = cell.num_drafts / cell.num_rounds
            lines.append(
                f"{temperature}: drafted in {100 * share:.0f} % of the rounds; τ is over these,"
                f" tokens per target forward ({cell.tokens_per_forward:.2f}) over all"
            )
        lines += [f"{temperature}: {line}" for line in methods_note(cell)]
        if len(cell.acceptance_by_position) > 1:
            bins = ", ".join(
                f"{b.start:,} to {2 * b.start - 1:,} {b.acceptance_length:.2f} ({b.rounds:,})"
                for b in cell.acceptance_by_position
            )
            lines.append(f"τ by position in the text at {temperature} (rounds): {bins}")
        lines += timing_notes(cell)
        lines += [f"{temperature}: {line}" for line in why_slower(cell)]
    return lines + suite_notes(report)


def methods_note(cell: Cell) -> list[str]:
    """Which method drafted how many of the rounds, where one drafts beside a head."""
    by_method = cell.num_drafts_by_method.items()
    shares = [f"{method} in {number / cell.num_rounds:.0%}" for method, number in by_method]
    return [f"drafted by {', '.join(shares)} of the rounds"] if shares else []


def timing_notes(cell: Cell) -> list[str]:
    """How many tokens the times of a cell rest on, and the passes that stalled."""
    if not (drafted := cell.passes.get(SPECULATIVE)):
        return []
    temperature = f"T={cell.temperature:g}"
    tokens = [run.tokens for run in drafted]
    counts = " to ".join(f"{count:,}" for count in sorted({min(tokens), max(tokens)}))
    lines = [
        f"{temperature}: timed with drafting: {counts} tokens per workload and pass; passes:"
        f" {num_repeats(cell.passes)}"
    ]
    lines += [f"{temperature}: {sentence}" for sentence in rounds_notes(cell)]
    for stall in stalled(cell.passes):
        drafting = {SPECULATIVE: "with", AUTOREGRESSIVE: "without"}[stall.kind]
        lines.append(
            f"{temperature}, {stall.run.workload}, {drafting} drafting: {stall_note(stall)}"
        )
    return lines


def rounds_notes(cell: Cell) -> list[str]:
    """Whether the timed rounds ran eager or compiled; nothing where it is not known."""
    drafted, off = (
        how_rounds_ran(cell.passes.get(kind, [])) for kind in (SPECULATIVE, AUTOREGRESSIVE)
    )
    if not drafted:
        return []
    if off in ("", drafted):
        return [f"rounds: {drafted}"]
    return [f"rounds: {drafted} with drafting, {off} without"]


def how_timed(report: AcceptanceReport) -> str:
    """How the timed rounds of the report's own engine ran, over all temperatures; empty where it is
    not known."""
    sentences = [sentence for cell in report.pooled() for sentence in rounds_notes(cell)]
    return "; ".join(dict.fromkeys(sentences))


def stall_note(stall: Stall) -> str:
    """A pass that stalled, and whether it moves the results."""
    effect = "the median leaves it out"
    if stall.repeats < LEAST_REPEATS:
        effect = f"with fewer than {LEAST_REPEATS} repeats it counts; measure with more"
    return (
        f"pass {stall.run.repeat + 1} of {stall.repeats} took {stall.ratio:.1f} times the median"
        f" of its kind: {effect}"
    )


def print_report(report: AcceptanceReport, console: Console | None = None) -> None:
    """Print the cells by temperature, one engine under the other if there are several, every suite,
    the notes and the gates."""
    console = console or Console()
    provenance = report.provenance
    title = (
        f"{provenance.drafter_method} for {provenance.target_name},"
        f" K={provenance.num_speculative_tokens}, {provenance.dtype}"
    )
    for name, value in provenance.speculative_config.items():
        title += f", {name}: {value}"
    if provenance.engine != OUR_ENGINE:
        title += f" in {provenance.engine}"
    if any(cell.suite is None for cell in report.headline):
        console.print(_cells(report, title))
    for suite in report.suites:
        part = report.of_suite(suite.name)
        console.print(_cells(part, f"{suite.name}: {title}"))
        rates = new_table("acceptance by position, %", "", "T", *_positions(part))
        for values in position_rows(part.pooled()):
            rates.add_row(*values)
        console.print(rates)
    if costs := [cell for cell in report.pooled() if cell.round_cost]:
        console.print(cost_table((f"T={cell.temperature:g}", cell) for cell in costs))
    for line in notes(report):
        console.print(line, highlight=False)
    if report.gates:
        console.print(_gates(report))


def cell_table(cells: Iterable[Cell], title: str) -> Table:
    """Cells that are no whole report."""
    table = new_table(title, *COLUMNS)
    for cell in cells:
        table.add_row(*_values(row(cell) | {"workload": cell.label}))
    return table


def _cells(report: AcceptanceReport, title: str) -> Table:
    table = new_table(title, *COLUMNS)
    first, *others = report.engines()
    for cell in report.own_cells(first):
        style = "bold" if cell.workload == ALL_WORKLOADS else None
        table.add_row(*_values(row(cell)), style=style)
        for engine in others:
            if other := report.cell(cell.workload, cell.temperature, engine):
                table.add_row(*_values(row(other) | {"workload": f"  in {engine}"}))
        if cell.workload == ALL_WORKLOADS:
            table.add_section()
    return table


def _values(cells: Row) -> list[str]:
    return [cells[name] for name in COLUMNS]


def new_table(title: str, first: str, *headings: str) -> Table:
    """An empty table; all columns but the first are numbers. Its title may be wider than it is."""
    table = Table(
        title=Text(title, overflow="ignore", no_wrap=True),
        title_justify="left",
        title_style="bold",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    table.add_column(first, overflow="fold")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _gates(report: AcceptanceReport) -> Table:
    """Every gate with its bound, the result reached and the verdict."""
    table = new_table("gates", "result", "reached", "at least", "at most", "")
    for gate in report.gates:
        numbers = [
            "" if number is None else f"{number:.4g}" for number in (gate.value, gate.min, gate.max)
        ]
        verdict = Text("passed", style="green") if gate.passed else Text("missed", style="bold red")
        table.add_row(gate.name, *numbers, verdict)
    return table


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; the row of all workloads is bold. Names are written as text, whatever is in them."""
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)]]
    for first, *rest in rows:
        name = html.escape(" ".join(first.split()), quote=False).replace("|", "\\|")
        lines.append([f"**{name}**" if name == ALL_WORKLOADS else name, *rest])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def report_tables(report: AcceptanceReport) -> str:
    """Every cell of the report's own engine, and acceptance by position, as `markdown`."""
    cells = markdown(COLUMNS, [_values(row(cell)) for cell in report.own_cells()])
    heads = ["by position, %", "T", *_positions(report)]
    return f"{cells}\n\n{markdown(heads, position_rows(report.pooled()))}"
