"""`draftsmith bench`: measures, prints and saves. Imports no client before it runs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.text import Text

from draftsmith.inference import flags
from draftsmith.inference.bench.bench_options import BenchOptions
from draftsmith.inference.report.table import new_table
from draftsmith.inference.whole_file import check_writable, write_whole

if TYPE_CHECKING:
    from draftsmith.inference.bench.datasets import Question

TOTALS = {  # fields of a result -> their rows
    "completed": "completed requests",
    "failed": "failed requests",
    "duration": "duration, s",
    "total_input_tokens": "prompt tokens",
    "total_output_tokens": "output tokens",
    "output_throughput": "output tokens/s",
    "spec_decode_acceptance_length": "acceptance length",
    "spec_decode_acceptance_rate": "acceptance rate, %",
}
KINDS = ("mean", "median", "p90", "p99")
LATENCIES = {
    "ttft": "time to first token",
    "tpot": "per token after the first",
    "itl": "between pieces of the stream",
    "e2el": "end to end",
}


def register(app: typer.Typer) -> None:
    """Adds `bench` to a command line."""
    flags.register(app, "bench", BenchOptions, run)


def run(values: flags.Values, _: Sequence[str] = ()) -> None:
    """Exit code 1: a request failed."""
    from draftsmith.inference.bench.load_generator import measure, prepare

    options = flags.validated(BenchOptions, "bench", values)
    console = Console()
    compared = options.baseline_url is not None
    file = Path(options.result_dir) / ("comparison.json" if compared else "bench.json")
    saved = compared or options.save_result
    if saved:
        check_writable("--result-dir", file)
    questions = prepare(options)
    if compared:
        result = _compared(options, questions, file, console)
        print_comparison(result, console)
    else:
        result = measure(options, questions)
        print_result(result, console)
        if saved:
            _save(file, result)
    if saved:
        console.print(str(file), highlight=False, soft_wrap=True)
    if options.random:
        console.print(Text("acceptance on random tokens says nothing about a drafter", "yellow"))
    if result["failed"]:
        raise typer.Exit(1)


def _compared(
    options: BenchOptions, questions: Sequence[Question], file: Path, console: Console
) -> dict[str, Any]:
    """The comparison, which is saved as far as it is known after every concurrency."""
    from draftsmith.inference.bench.compare_servers import compare

    saved = False

    def keep(comparison: dict[str, Any]) -> None:
        nonlocal saved
        _save(file, comparison)
        saved = True

    try:
        return compare(options, questions, keep)
    except (Exception, KeyboardInterrupt):
        if saved:
            console.print(f"what was measured is in {file}", highlight=False, soft_wrap=True)
        raise


def _save(file: Path, result: dict[str, Any]) -> None:
    from draftsmith.inference.bench.load_generator import without_details

    write_whole(file, json.dumps(without_details(result)) + "\n")


def print_result(result: dict[str, Any], console: Console) -> None:
    """Totals, acceptance if the server reports it, latencies, and errors."""
    table = new_table(f"{result['model_id']}, {result['dataset_name']}", "", "")
    for name, title in TOTALS.items():
        if name in result:
            table.add_row(title, _cell(result[name]))
    console.print(table)
    table = new_table("milliseconds", "", *KINDS)
    for name, meaning in LATENCIES.items():
        values = [_cell(result[f"{kind}_{name}_ms"]) for kind in KINDS]
        table.add_row(f"{name.upper()}, {meaning}", *values)
    console.print(table)
    for error, count in Counter(filter(None, result["errors"])).most_common(5):
        console.print(Text(f"{count} failed: {error}", style="red"))


def print_comparison(comparison: dict[str, Any], console: Console) -> None:
    """A row for every concurrency and way of serving, with its gain over no drafting and the range
    of that; then the advice."""
    title = f"{comparison['model_id']}, {comparison['dataset_name']}: drafting off and on"
    columns = ("", "tokens/s", "gain", "TTFT ms", "TPOT ms", "τ", "same")
    table = new_table(title, "users", *columns)
    for level in comparison["levels"]:
        for mode, result in level["modes"].items():
            gain = ""
            if "gain" in result:
                gain = "{:.2f} ({:.2f}–{:.2f})".format(result["gain"], *result["gain_range"])
            table.add_row(
                str(level["max_concurrency"]),
                mode,
                _cell(result["output_throughput"]),
                gain,
                _cell(result["median_ttft_ms"]),
                _cell(result["median_tpot_ms"]),
                _cell(result.get("spec_decode_acceptance_length", "")),
                _cell(result.get("identical_outputs", "")),
            )
    console.print(table)
    if comparison["failed"]:
        advice = f"{comparison['failed']} requests failed: no advice"
    elif comparison["advice"] is None:
        advice = "advice: serve without a drafter; no K gains at any concurrency"
    else:
        advice = f"advice: --speculative-config '{json.dumps(comparison['advice'])}'"
    console.print(advice, markup=False, soft_wrap=True)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    return f"{value:,d}" if isinstance(value, int) else f"{value:,.2f}"
