"""`draftsmith bench`: reads the options, measures, prints and saves."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console

from inference.bench.advice import LARGEST_BATCH, SCHEDULE
from inference.bench.compare import Mode, Server, compare
from inference.bench.options import BenchOptions, read_options
from inference.bench.run import measure, prepare, without_details
from inference.bench.servers import started
from inference.bench.tables import print_advice, print_comparison, print_result
from inference.whole_file import write_whole
from speculators.errors import ConfigError

ADVICE = "speculative_config.json"


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
    folder = Path(options.result_dir)
    if options.baseline_url is not None:
        servers: dict[str, Server] = {
            "off": lambda: nullcontext(str(options.baseline_url)),
            "on": lambda: nullcontext(options.url),
        }
        comparison = compare(options, prepare(options), servers, together=True)
    else:
        config = _complete(
            options, options.speculative_config or {}, "--compare: speculative_config"
        )
        if options.draft_lengths and SCHEDULE in config:
            raise ConfigError(
                f"--draft-lengths measure what {SCHEDULE} says by batch size; leave one out"
            )
        modes, configs = serving_modes(options, config)
        servers = {name: _started(options, name, each) for name, each in configs.items()}
        comparison = compare(
            options,
            prepare(options),
            servers,
            together=options.together,
            modes=modes,
            config=None if SCHEDULE in config else config,
        )
        comparison |= {
            "speculative_config": options.speculative_config,
            "serve_args": options.serve_args or None,
        }
    file = folder / (options.result_filename or "comparison.json")
    _save(comparison, file)
    print_comparison(comparison, console)
    console.print(str(file), highlight=False, soft_wrap=True)
    if "advice" in comparison:
        print_advice(comparison, console)
        _save(comparison["advice"]["speculative_config"], folder / ADVICE)
        use = (
            f'--speculative-config "$(cat {folder / ADVICE})", of `vllm serve` and of'
            " `draftsmith serve`"
        )
        console.print(use, highlight=False, soft_wrap=True, markup=False)
    return 1 if comparison["failed"] else 0


def _complete(options: BenchOptions, given: dict[str, Any], place: str) -> dict[str, Any]:
    """A speculative_config with its method and K, read from the drafter where they are not given.
    ConfigError names the `place` of one that lacks them."""
    from inference.entrypoints.speculative_defaults import complete

    config = complete(dict(given), str(options.model), trust_remote_code=options.trust_remote_code)
    if not isinstance(config.get("num_speculative_tokens"), int) or not config.get("method"):
        raise ConfigError(f"{place} needs method and num_speculative_tokens, or a drafter's folder")
    return config


def serving_modes(
    options: BenchOptions, config: dict[str, Any]
) -> tuple[dict[str, Mode], dict[str, dict[str, Any] | None]]:
    """What is measured, and the speculative_config of each server that this needs. Our server takes
    K with each request, so that one serves them all; vLLM has one for each K."""
    own = config["num_speculative_tokens"]
    lengths = sorted({own, *options.draft_lengths})
    flags = shlex.split(options.serve_args)
    vllm = "--engine=vllm" in flags or ("--engine", "vllm") in pairwise(flags)
    modes, configs = {"off": Mode("off")}, {"off": None, "on": config}
    for tokens in lengths:
        name = "on" if tokens == own else f"K={tokens}"
        if lengths == [own]:
            modes[name] = Mode("on", tokens=own)
        elif vllm:
            wait = {SCHEDULE: [[1, LARGEST_BATCH, 0]]}
            configs[name] = config | ({"num_speculative_tokens": tokens} if tokens else wait)
            modes[name] = Mode(name, tokens=tokens)
        else:
            configs["on"] = config | {"num_speculative_tokens": lengths[-1]}
            modes[name] = Mode("on", {"num_speculative_tokens": tokens}, tokens)
    return modes, configs


def _started(options: BenchOptions, name: str, config: dict[str, Any] | None) -> Server:
    log = Path(options.result_dir) / f"server-{name.replace('=', '-')}.log"
    return partial(
        started,
        str(options.model),
        config,
        shlex.split(options.serve_args),
        log,
        options.ready_check_timeout_sec,
    )


def _filename(result: dict[str, Any]) -> str:
    """vLLM's name of a result."""
    concurrency = (
        "" if result["max_concurrency"] is None else f"-concurrency{result['max_concurrency']}"
    )
    model = str(result["model_id"]).rstrip("/").split("/")[-1]
    label = result["label"] or result["backend"]
    return f"{label}-{result['request_rate']}qps{concurrency}-{model}-{result['date']}.json"


def _save(result: dict[str, Any] | None, path: Path) -> None:
    try:
        write_whole(path, json.dumps(result) + "\n")
    except OSError as error:
        raise ConfigError(
            f"{path}: the result could not be written: {error.strerror}; give another --result-dir "
            "or --result-filename"
        ) from error
