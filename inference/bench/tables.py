"""Results on a terminal, within 80 columns. Computes no figure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from inference.bench.figures import LATENCIES

MOST_ERRORS = 5  # kinds of them that are shown

TOTALS = (
    ("successful requests", "completed", "d"),
    ("failed requests", "failed", "d"),
    ("most at a time allowed", "max_concurrency", "d"),
    ("most at a time seen", "max_concurrent_requests", "d"),
    ("requests/s offered", "request_rate", ".2f"),
    ("seconds", "duration", ".2f"),
    ("input tokens", "total_input_tokens", ",d"),
    ("output tokens", "total_output_tokens", ",d"),
    ("requests/s", "request_throughput", ".2f"),
    ("output tokens/s", "output_throughput", ".2f"),
    ("output tokens/s, busiest second", "max_output_tokens_per_s", ".2f"),
    ("tokens/s, input and output", "total_token_throughput", ".2f"),
)
DRAFTING = (
    ("acceptance length", "spec_decode_acceptance_length", ".2f"),
    ("drafted tokens accepted, %", "spec_decode_acceptance_rate", ".1f"),
    ("verified proposals", "spec_decode_num_drafts", ",d"),
    ("drafted tokens", "spec_decode_draft_tokens", ",d"),
    ("accepted tokens", "spec_decode_accepted_tokens", ",d"),
)


def print_result(result: dict[str, Any], console: Console) -> None:
    """Totals, latencies, acceptance if the server reports it, and what failed."""
    totals = _table(f"{result['model_id']}, {result['dataset_name']}", "", "")
    for row in _named(result, TOTALS):
        totals.add_row(*row)
    console.print(totals)
    console.print(_latencies(result))
    if "spec_decode_num_drafts" in result:
        drafting = _table("drafting (/metrics)", "", "")
        for row in _named(result, DRAFTING):
            drafting.add_row(*row)
        for place, rate in enumerate(result["spec_decode_per_position_acceptance_rates"], 1):
            drafting.add_row(f"first {place} accepted, %", f"{100 * rate:.1f}")
        console.print(drafting)
    _print_notes(result, result["errors"], console)


def print_comparison(comparison: dict[str, Any], console: Console) -> None:
    """A row per concurrency: tokens/s of all and of one user, off, on and their ratio; τ; equal outputs."""
    title = f"{comparison['model_id']}, {comparison['dataset_name']}: drafting off and on"
    table = _table(title, "at a time", "tok/s off", "on", "×", "per user off", "on", "×", "TTFT ×", "τ")
    greedy = "identical_outputs" in comparison["levels"][0]
    if greedy:
        table.add_column("same", justify="right", no_wrap=True)
    for level in comparison["levels"]:
        off, on, ratios = level["off"], level["on"], level["ratios"]
        cells = [str(level["max_concurrency"])]
        for name in ("output_throughput", "tokens_per_second_per_user"):
            cells += [_speed(off[name]), _speed(on[name]), _cell(ratios[name], ".2f")]
        cells += [_cell(ratios["median_ttft_ms"], ".2f"), _cell(on.get("spec_decode_acceptance_length"), ".2f")]
        table.add_row(*cells, *([f"{level['identical_outputs']}/{level['compared_outputs']}"] if greedy else []))
    console.print(table)
    console.print("×: on ÷ off; a TTFT below 1 is shorter with drafting", style="dim", highlight=False)
    failed = sum(level[mode]["failed"] for level in comparison["levels"] for mode in ("off", "on"))
    if failed:
        console.print(Text(f"{failed} requests failed and are in no figure but their number", style="red"))
    _print_notes(comparison, (), console)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=Text(title), title_justify="left", title_style="bold", box=SIMPLE_HEAD, padding=(0, 1, 0, 0),
                  show_header=any(columns))  # fmt: skip
    for i, name in enumerate(columns):
        table.add_column(name, justify="left" if i == 0 else "right", no_wrap=i > 0)
    return table


def _named(result: dict[str, Any], rows: Sequence[tuple[str, str, str]]) -> list[tuple[str, str]]:
    return [(words, _cell(result[name], form)) for words, name, form in rows if result.get(name) is not None]


def _latencies(result: dict[str, Any]) -> Table:
    names = [name for name in LATENCIES if f"mean_{name}_ms" in result]
    suffix = f"_{names[0]}_ms" if names else ""
    kinds = [key.removesuffix(suffix) for key in result if names and key.endswith(suffix)]
    kinds = [kind for kind in kinds if kind != "p50"]  # the median
    table = _table("milliseconds", "", *kinds)
    for name in names:
        words = f"{name.upper().replace('_', ' ')}, {LATENCIES[name]}"
        table.add_row(words, *(_cell(result[f"{kind}_{name}_ms"], ".2f") for kind in kinds))
    return table


def _speed(value: float | None) -> str:
    return _cell(value, ".1f" if value is not None and value < 1000 else ".0f")


def _cell(value: Any, form: str) -> str:
    return "-" if value is None else value if isinstance(value, str) else format(value, form)


def _print_notes(result: dict[str, Any], errors: Sequence[str], console: Console) -> None:
    counted = Counter(error for error in errors if error)
    for error, count in counted.most_common(MOST_ERRORS):
        console.print(Text(f"{count} failed: {error}", style="red"))
    if len(counted) > MOST_ERRORS:
        console.print(Text(f"and {len(counted) - MOST_ERRORS} other errors", style="red"))
    if "note" in result:
        console.print(Text(f"note: {result['note']}", style="yellow"))
