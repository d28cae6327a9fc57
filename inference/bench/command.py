"""`draftsmith bench`: reads the options, measures, prints and saves."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from inference.bench.compare import MODES, Server, compare, draw
from inference.bench.options import BenchOptions, read_options
from inference.bench.run import measure, prepare, without_details
from inference.bench.servers import started
from inference.bench.tables import print_comparison, print_result
from inference.whole_file import write_whole
from speculators.errors import ConfigError


def run(arguments: Sequence[str]) -> int:
    """The exit code: 1 if a request failed."""
    options, console = read_options(arguments), Console()
    if options.compare:
        return _compare(options, console)
    result = measure(options, prepare(options))
    print_result(result, console)
    if options.save_result:
        path = Path(options.result_dir) / (options.result_filename or _filename(result))
        _save(result if options.save_detailed else without_details(result), path)
        console.print(str(path), highlight=False, soft_wrap=True)
    return 1 if result["failed"] else 0


def _compare(options: BenchOptions, console: Console) -> int:
    folder, existing = Path(options.result_dir), options.baseline_url is not None
    comparison = compare(options, prepare(options), _servers(options), together=existing or options.together)
    if not existing:
        comparison |= {"speculative_config": options.speculative_config, "serve_args": options.serve_args or None}
    file = folder / (options.result_filename or "comparison.json")
    _save(comparison, file)
    draw(comparison, file.with_suffix(".png"))
    print_comparison(comparison, console)
    console.print(f"{file}, {file.with_suffix('.png')}", highlight=False, soft_wrap=True)
    return 1 if any(level[mode]["failed"] for level in comparison["levels"] for mode in MODES) else 0


def _servers(options: BenchOptions) -> dict[str, Server]:
    if options.baseline_url is not None:
        urls = {"off": options.baseline_url, "on": options.url}
        return {mode: _existing(url) for mode, url in urls.items()}
    flags, folder, ready_s = shlex.split(options.serve_args), Path(options.result_dir), options.ready_check_timeout_sec
    return {
        mode: partial(started, str(options.model), config, flags, folder / f"server-{mode}.log", ready_s)
        for mode, config in (("off", None), ("on", options.speculative_config))
    }


def _existing(url: str) -> Server:
    return lambda: nullcontext(url)


def _filename(result: dict[str, Any]) -> str:
    """vLLM's name of a result."""
    concurrency = "" if result["max_concurrency"] is None else f"-concurrency{result['max_concurrency']}"
    model = str(result["model_id"]).rstrip("/").split("/")[-1]
    label = result["label"] or result["backend"]
    return f"{label}-{result['request_rate']}qps{concurrency}-{model}-{result['date']}.json"


def _save(result: dict[str, Any], path: Path) -> None:
    try:
        write_whole(path, json.dumps(result) + "\n")
    except OSError as error:
        raise ConfigError(f"{path}: the result could not be written: {error.strerror}; give another --result-dir "
                          "or --result-filename") from error  # fmt: skip
