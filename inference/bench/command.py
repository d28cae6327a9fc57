"""`draftsmith bench`: measures, prints and saves. Imports no client before it runs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from draftsmith.inference import flags
from draftsmith.inference.bench.advice import engine_flags
from draftsmith.inference.bench.options import PANELS, BenchOptions
from draftsmith.inference.whole_file import write_whole
from draftsmith.speculators.errors import ConfigError

RESULT, COMPARISON = "bench.json", "comparison.json"
TOTALS = (  # fields of a result
    "completed",
    "failed",
    "max_concurrency",
    "request_rate",
    "duration",
    "total_input_tokens",
    "total_output_tokens",
    "request_throughput",
    "output_throughput",
)
KINDS = ("mean", "median", "p90", "p99")
LATENCIES = {
    "ttft": "time to first token",
    "tpot": "per token after the first",
    "itl": "between pieces of the stream",
    "e2el": "end to end",
}
MAX_ERRORS = 5  # different ones that are shown


def register(app: typer.Typer) -> None:
    """Adds `bench` to a command line."""
    flags.register(app, "bench", BenchOptions, run, panels=PANELS)


def run(given: flags.Values, _: Sequence[str] = ()) -> None:
    """Exit code 1: a request failed."""
    from draftsmith.inference.bench.compare import compare
    from draftsmith.inference.bench.load import measure, prepare, without_details

    options, console = flags.validated(BenchOptions, "bench", given), Console()
    folder, work = Path(options.result_dir), prepare(options)
    if options.baseline_url is not None:
        result = compare(options, work)
        print_comparison(result, console)
        _save(result, folder / COMPARISON, console)
    else:
        result = measure(options, work)
        print_result(result, console)
        if options.save_result:
            _save(without_details(result), folder / RESULT, console)
    if options.random:
        console.print(Text("acceptance on random tokens says nothing about a drafter", "yellow"))
    if result["failed"]:
        raise typer.Exit(1)


def _save(result: dict[str, Any], path: Path, console: Console) -> None:
    try:
        write_whole(path, json.dumps(result) + "\n")
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror}; give another", where="--result-dir"
        ) from error
    console.print(str(path), highlight=False, soft_wrap=True)


def print_result(result: dict[str, Any], console: Console) -> None:
    """Totals, acceptance if the server reports it, latencies, and errors."""
    rows = [[name.replace("_", " "), _cell(result[name])] for name in TOTALS]
    if "spec_decode_num_drafts" in result:
        rows.append(["acceptance length", _cell(result["spec_decode_acceptance_length"])])
        rows.append(["acceptance rate, %", _cell(result["spec_decode_acceptance_rate"])])
        rates = result["spec_decode_per_position_acceptance_rates"]
        rows.append(["accepted by position, %", " ".join(f"{100 * rate:.0f}" for rate in rates)])
    _print_table(console, f"{result['model_id']}, {result['dataset_name']}", ["", ""], rows)
    rows = []
    for name, meaning in LATENCIES.items():
        values = [_cell(result[f"{kind}_{name}_ms"]) for kind in KINDS]
        rows.append([f"{name.upper()}, {meaning}", *values])
    _print_table(console, "milliseconds", ["", *KINDS], rows)
    errors = Counter(error for error in result["errors"] if error)
    for error, count in errors.most_common(MAX_ERRORS):
        console.print(Text(f"{count} failed: {error}", style="red"))


def print_comparison(comparison: dict[str, Any], console: Console) -> None:
    """A row for every concurrency and way of serving, with its gain over no drafting and the range
    of that; then the advice."""
    columns = ["users", "", "tokens/s", "gain", "TTFT ms", "TPOT ms", "τ", "same"]
    rows = []
    for level in comparison["levels"]:
        for mode, result in level["modes"].items():
            gain = ""
            if "gain" in result:
                gain = "{:.2f} ({:.2f}–{:.2f})".format(result["gain"], *result["gain_range"])
            times = [_cell(result[f"median_{name}_ms"]) for name in ("ttft", "tpot")]
            length = result.get("spec_decode_acceptance_length", "")
            same = str(result.get("identical_outputs", ""))
            speed = _cell(result["output_throughput"])
            users = str(level["max_concurrency"])
            rows.append([users, mode, speed, gain, *times, _cell(length), same])
    title = f"{comparison['model_id']}, {comparison['dataset_name']}: drafting off and on"
    _print_table(console, title, columns, rows)
    if comparison["failed"]:
        console.print(Text(f"{comparison['failed']} requests failed: no advice", style="red"))
    if comparison["repeats"] == 1:
        console.print(Text("one repeat tells no spread; give --repeats 3", "yellow"))
    advice = comparison["advice"]
    if advice is not None:
        for engine, flags in engine_flags(advice):
            console.print(f"{engine}: {flags}", markup=False, soft_wrap=True)
    elif not comparison["failed"]:
        console.print("advice: serve without a drafter; no K gains at any concurrency")


def _print_table(
    console: Console, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]
) -> None:
    table = Table(title=Text(title), title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.show_header = any(columns)
    for i, name in enumerate(columns):
        table.add_column(name, justify="right" if i else "left", no_wrap=i > 0)
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _cell(value: Any) -> str:
    if value is None or isinstance(value, str):
        return "-" if value is None else value
    return f"{value:,d}" if isinstance(value, int) else f"{value:,.2f}"
