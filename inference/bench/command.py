"""`draftsmith bench` from its words to what it prints and saves."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path

from rich.console import Console

from inference.bench.compare import Server, compare, draw
from inference.bench.flags import bench_options, read_flags
from inference.bench.run import BenchOptions, measure, prepare, result_path, save, without_details
from inference.bench.servers import started
from inference.bench.tables import print_comparison, print_result

COMPARISON = "comparison"
LEVELS = (1, 2, 4, 8)  # requests at a time


def run(arguments: Sequence[str]) -> int:
    """The exit code: 1 if a request failed."""
    flags = read_flags(arguments)
    options = bench_options(flags)
    if flags.compare:
        return _compare(flags, options)
    result = measure(options, prepare(options))
    console = Console()
    print_result(result, console)
    if flags.save_result:
        path = result_path(result, flags.result_dir, flags.result_filename)
        save(result if flags.save_detailed else without_details(result), path)
        console.print(str(path), highlight=False, soft_wrap=True)
    return 1 if result["failed"] else 0


def _compare(flags: argparse.Namespace, options: BenchOptions) -> int:
    folder = Path(flags.result_dir or ".")
    there_already = flags.baseline_url is not None
    comparison = compare(
        options, prepare(options), _servers(flags, options, folder), flags.concurrencies or LEVELS,
        together=there_already or bool(flags.together),
    )  # fmt: skip
    if not there_already:
        comparison |= {"speculative_config": flags.speculative_config, "serve_args": flags.serve_args}
    file = folder / (flags.result_filename or f"{COMPARISON}.json")
    save(comparison, file)
    picture = file.with_suffix(".png")
    draw(comparison, picture)
    console = Console()
    print_comparison(comparison, console)
    console.print(f"{file}, {picture}", highlight=False, soft_wrap=True)
    return 1 if any(level[mode]["failed"] for level in comparison["levels"] for mode in ("off", "on")) else 0


def _servers(flags: argparse.Namespace, options: BenchOptions, folder: Path) -> dict[str, Server]:
    if flags.baseline_url is not None:
        urls = {"off": flags.baseline_url.rstrip("/").removesuffix("/v1"), "on": options.base_url}
        return {mode: _there_already(url) for mode, url in urls.items()}
    words = shlex.split(flags.serve_args or "")
    return {
        mode: partial(started, flags.model, config, words, folder / f"server-{mode}.log", flags.ready_check_timeout_sec)
        for mode, config in (("off", None), ("on", flags.speculative_config))
    }


def _there_already(url: str) -> Server:
    return lambda: nullcontext(url)
