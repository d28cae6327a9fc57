"""Results on a terminal, within 80 columns. Computes no figure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from inference.bench.figures import LATENCIES

MAX_ERRORS = 5  # different ones that are shown

TOTALS = (  # fields of a result
    "completed",
    "failed",
    "max_concurrency",
    "max_concurrent_requests",
    "request_rate",
    "duration",
    "total_input_tokens",
    "total_output_tokens",
    "request_throughput",
    "output_throughput",
    "max_output_tokens_per_s",
    "total_token_throughput",
)
DRAFTING = ("acceptance_length", "acceptance_rate", "num_drafts", "draft_tokens", "accepted_tokens")

LABELS = {"acceptance_rate": "acceptance rate, %"}


def print_result(result: dict[str, Any], console: Console) -> None:
    """Totals, latencies, acceptance if the server reports it, and errors."""
    totals = [
        (name.replace("_", " "), _cell(result[name])) for name in TOTALS if result[name] is not None
    ]
    _print_table(console, f"{result['model_id']}, {result['dataset_name']}", ("", ""), totals)
    names = [name for name in LATENCIES if f"mean_{name}_ms" in result]
    kinds = [
        key.removesuffix(f"_{names[0]}_ms")
        for key in result
        if names and key.endswith(f"_{names[0]}_ms")
    ]
    kinds = [kind for kind in kinds if kind != "p50"]  # the median
    rows = [
        (
            f"{name.upper().replace('_', ' ')}, {LATENCIES[name]}",
            *(_cell(result[f"{k}_{name}_ms"]) for k in kinds),
        )
        for name in names
    ]
    _print_table(console, "milliseconds", ("", *kinds), rows)
    if "spec_decode_num_drafts" in result:
        rates = result["spec_decode_per_position_acceptance_rates"]
        positions = [
            (f"first {n} accepted, %", f"{100 * rate:.1f}") for n, rate in enumerate(rates, 1)
        ]
        drafting = [
            (LABELS.get(name, name.replace("_", " ")), _cell(result[f"spec_decode_{name}"]))
            for name in DRAFTING
        ]
        _print_table(console, "drafting (/metrics)", ("", ""), [*drafting, *positions])
    errors = Counter(error for error in result["errors"] if error)
    for error, count in errors.most_common(MAX_ERRORS):
        console.print(Text(f"{count} failed: {error}", style="red"))
    if len(errors) > MAX_ERRORS:
        console.print(Text(f"and {len(errors) - MAX_ERRORS} other errors", style="red"))
    _print_note(result, console)


def print_comparison(comparison: dict[str, Any], console: Console) -> None:
    """A row per concurrency: tokens/s of all users and of one, off, on and their ratio; τ; equal
    outputs."""
    levels, rows = comparison["levels"], []
    for level in levels:
        off, on, ratios = level["off"], level["on"], level["ratios"]
        cells = [str(level["max_concurrency"])]
        for name in ("output_throughput", "tokens_per_second_per_user"):
            cells += [
                _cell(value, ".0f" if value and value >= 1000 else ".1f")
                for value in (off[name], on[name])
            ]
            cells.append(_cell(ratios[name]))
        cells += [_cell(ratios["median_ttft_ms"]), _cell(on.get("spec_decode_acceptance_length"))]
        if "identical_outputs" in level:
            cells.append(f"{level['identical_outputs']}/{level['compared_outputs']}")
        rows.append(cells)
    columns = ("users", "tok/s off", "on", "×", "per user off", "on", "×", "TTFT ×", "τ", "same")[
        : len(rows[0])
    ]
    title = f"{comparison['model_id']}, {comparison['dataset_name']}: drafting off and on"
    _print_table(console, title, columns, rows)
    console.print(
        "×: on ÷ off; a TTFT below 1 is shorter with drafting", style="dim", highlight=False
    )
    if failed := comparison["failed"]:
        console.print(Text(f"{failed} requests failed; only their number is shown", style="red"))
    _print_note(comparison, console)


def print_advice(comparison: dict[str, Any], console: Console) -> None:
    """Median gains by concurrency and K, the K that is advised with its gain's range, and the
    configuration."""
    advice = comparison["advice"]
    lengths = list(advice["levels"][0]["median_gains"])
    rows = []
    for level in advice["levels"]:
        gains = [_cell(level["median_gains"][tokens]) for tokens in lengths]
        rows.append(
            (
                str(level["max_concurrency"]),
                *gains,
                str(level["num_speculative_tokens"]),
                _range(level["gain"]),
            )
        )
    title = f"tokens/s ÷ without a drafter, medians of {advice['repeats']} repeats"
    _print_table(
        console, title, ("users", *(f"K={tokens}" for tokens in lengths), "advised", "gain"), rows
    )
    if advice["speculative_config"] is None:
        console.print(
            "advice: serve without a drafter; none gained at any concurrency", highlight=False
        )
    elif advice["off_above"] is not None:
        console.print(
            f"advice: drafting is off above {advice['off_above']} requests at a time",
            highlight=False,
        )
    if advice["repeats"] == 1:
        console.print(Text("one repeat tells no spread; give --repeats 3 or more", style="yellow"))


def _range(gain: dict[str, float]) -> str:
    return f"{gain['median']:.2f} ({gain['smallest']:.2f}–{gain['largest']:.2f})"


def _print_table(
    console: Console, title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]
) -> None:
    table = Table(
        title=Text(title),
        title_justify="left",
        title_style="bold",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        show_header=any(columns),
    )
    for i, name in enumerate(columns):
        table.add_column(name, justify="right" if i else "left", no_wrap=i > 0)
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _cell(value: Any, form: str = ",.2f") -> str:
    if value is None or isinstance(value, str):
        return value or "-"
    return format(value, ",d" if isinstance(value, int) else form)


def _print_note(result: dict[str, Any], console: Console) -> None:
    if "note" in result:
        console.print(Text(f"note: {result['note']}", style="yellow"))
