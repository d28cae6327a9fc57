"""The flags of `bench`, named and read as those of `vllm bench serve`; `--compare` and its flags are our own."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from typing import Any

from inference.bench.datasets import DATASETS, DatasetOptions
from inference.bench.figures import LATENCIES
from inference.bench.run import ENDPOINTS, BenchOptions
from inference.server.flags import FlagParser, json_object, spelled
from speculators.errors import ConfigError

SAMPLING = ("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")
COMPARING = ("baseline_url", "speculative_config", "serve_args", "concurrencies", "together")


class BenchParser(FlagParser):
    def error(self, message: str) -> Any:
        raise ConfigError(f"bench: {message}; `draftsmith bench --help` lists the flags")


def read_flags(arguments: Sequence[str]) -> argparse.Namespace:
    """ConfigError for flags that do not fit."""
    flags = parser().parse_args(spelled(arguments))
    given = [name for name in COMPARING if getattr(flags, name) is not None]
    if given and not flags.compare:
        raise ConfigError(f"bench: --{given[0].replace('_', '-')} belongs to --compare; add it, or leave this out")
    if flags.compare:
        _check_comparison(flags)
    if flags.backend == "openai-chat" and flags.skip_chat_template:
        raise ConfigError("bench: --skip-chat-template: the server of openai-chat applies it; use --backend openai")
    endpoint = flags.endpoint or ENDPOINTS[flags.backend]
    usual = ENDPOINTS[flags.backend]
    if not endpoint.endswith("/completions") or ("/chat/" in endpoint) != ("/chat/" in usual):
        raise ConfigError(f"bench: --endpoint {endpoint}: --backend {flags.backend} speaks to {usual}")
    flags.endpoint = endpoint
    return flags


def _check_comparison(flags: argparse.Namespace) -> None:
    if (flags.baseline_url is None) == (flags.speculative_config is None):
        raise ConfigError(
            "bench --compare: give --baseline-url, a server without drafting beside the one of --base-url, or "
            "--speculative-config and --model, with which both are started"
        )
    if flags.speculative_config is not None:
        if flags.model is None or flags.base_url is not None:
            raise ConfigError("bench --compare: --speculative-config starts servers of --model, without --base-url")
    elif flags.serve_args is not None:
        raise ConfigError("bench --compare: --serve-args is for servers started with --speculative-config")
    if flags.max_concurrency is not None:
        raise ConfigError("bench --compare: give --concurrencies instead of --max-concurrency")


def bench_options(flags: argparse.Namespace) -> BenchOptions:
    comparing = bool(flags.compare)
    warmups = (2 if comparing else 0) if flags.num_warmups is None else flags.num_warmups
    body = {name: value for name in SAMPLING if (value := getattr(flags, name)) is not None} | flags.extra_body
    base_url = (flags.base_url or f"http://{_host(flags.host)}:{flags.port}").rstrip("/").removesuffix("/v1")
    return BenchOptions(
        dataset=_dataset(flags),
        base_url=base_url,
        ignore_eos=flags.ignore_eos or flags.dataset_name == "random",
        body=body,
        headers=dict(flags.header or ()),
        metadata=dict(flags.metadata or ()),
        num_warmups=warmups,
        request_timeout_s=flags.request_timeout,
        show_progress=not flags.disable_tqdm,
        **{name: getattr(flags, name) for name in (
            "backend", "endpoint", "model", "served_model_name", "tokenizer", "trust_remote_code",
            "skip_chat_template", "request_rate", "burstiness", "max_concurrency", "insecure", "percentile_metrics",
            "metric_percentiles", "label",
        )},
    )  # fmt: skip


def _host(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _dataset(flags: argparse.Namespace) -> DatasetOptions:
    own = {
        "random": flags.random_output_len,
        "custom": flags.custom_output_len,
        "spec_bench": flags.spec_bench_output_len,
    }
    return DatasetOptions(
        name=flags.dataset_name,
        path=flags.dataset_path,
        num_prompts=flags.num_prompts,
        seed=flags.seed,
        input_len=flags.input_len or flags.random_input_len,
        output_len=flags.output_len or own.get(flags.dataset_name),
        range_ratio=flags.random_range_ratio,
        prefix_len=flags.random_prefix_len,
        category=flags.spec_bench_category,
        shuffle=not flags.disable_shuffle,
        oversample=not flags.no_oversample,
    )


def parser() -> argparse.ArgumentParser:
    made = BenchParser("draftsmith bench", allow_abbrev=False, usage="%(prog)s --dataset-name NAME [flags]",
                       description="Load on a server compatible with OpenAI's, as of vllm bench serve.")  # fmt: skip
    _add_server(made.add_argument_group("the server"))
    _add_dataset(made.add_argument_group("what is asked"))
    _add_load(made.add_argument_group("when"))
    _add_sampling(made.add_argument_group("how it is answered; what is not given the server decides"))
    _add_results(made.add_argument_group("results"))
    _add_compare(made.add_argument_group("drafting off and on"))
    return made


def _add_server(group: Any) -> None:
    add = group.add_argument
    add("--backend", choices=ENDPOINTS, default="openai", help="openai: completions; openai-chat: chats (%(default)s)")
    add("--base-url", metavar="URL", help="where the server is, instead of --host and --port")
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=8000)
    add("--endpoint", help="path; default: the backend's")
    add("--model", help="the model's folder or id, also the tokenizer's; default: the server's first")
    add("--served-model-name", help="what the server calls it; default: --model")
    add("--tokenizer", help="folder or repository id; default: the model's")
    add("--trust-remote-code", action="store_true", help="run the tokenizer repository's code")
    add("--header", type=_pair, nargs="+", metavar="KEY=VALUE", help="sent along; OPENAI_API_KEY is, if it is set")
    add("--insecure", action="store_true", help="do not verify certificates")
    add("--request-timeout", type=_positive, default=6 * 3600.0, metavar="SECONDS",
        help="then a request has failed (%(default)g)")  # fmt: skip


def _add_dataset(group: Any) -> None:
    add = group.add_argument
    add("--dataset-name", required=True, choices=DATASETS, help="random is for load only: its acceptance means nothing")
    add("--dataset-path", metavar="FILE", help="JSONL of custom (prompt or messages), spec_bench, mt_bench (turns)")
    add("--num-prompts", type=_count, default=1000, help="requests (%(default)s)")
    add("--seed", type=int, default=0, help="of prompts, arrivals and sampling (%(default)s)")
    add("--input-len", type=_count, help="tokens; instead of --random-input-len")
    add("--output-len", type=_count, help="most tokens of an answer, of every dataset")
    add("--random-input-len", type=_count, default=1024, help="tokens (%(default)s)")
    add("--random-output-len", type=_count, default=128, help="tokens (%(default)s)")
    add("--random-range-ratio", type=float, default=0.0, help="lengths vary by this share, up and down (%(default)s)")
    add("--random-prefix-len", type=int, default=0, help="tokens that all prompts begin with, on top (%(default)s)")
    add("--custom-output-len", type=_count_or_rows, default=256, help="-1: output_tokens of the row (%(default)s)")
    add("--spec-bench-output-len", type=_count, default=256, help="(%(default)s)")
    add("--spec-bench-category", help="only rows of it, of spec_bench and mt_bench")
    add("--skip-chat-template", action="store_true", help="with --backend openai: send what was said as it is")
    add("--disable-shuffle", action="store_true", help="ask a file in its order")
    add("--no-oversample", action="store_true", help="ask a short file once only")


def _add_load(group: Any) -> None:
    add = group.add_argument
    add("--request-rate", type=_positive, default=math.inf, help="requests/s; inf: all at once (%(default)s)")
    add("--burstiness", type=_positive, default=1.0, help="1: Poisson; less: bursts; more: even (%(default)s)")
    add("--max-concurrency", type=_count, help="most requests under way; the others wait here")
    add("--num-warmups", type=int, help="requests before the measurement (0; 2 with --compare)")


def _add_sampling(group: Any) -> None:
    for name in SAMPLING:
        group.add_argument("--" + name.replace("_", "-"), type=int if name == "top_k" else float)
    group.add_argument("--ignore-eos", action="store_true", help="write on to the length asked for; random always does")
    group.add_argument("--extra-body", type=json_object, default={}, metavar="JSON", help="added to every request")


def _add_results(group: Any) -> None:
    add = group.add_argument
    add("--percentile-metrics", type=_metrics, default=("ttft", "tpot", "itl", "e2el"), metavar="NAMES",
        help=f"comma separated, of {', '.join(LATENCIES)} (ttft,tpot,itl,e2el)")  # fmt: skip
    add("--metric-percentiles", type=_percentiles, default=(50.0, 90.0, 99.0), metavar="NUMBERS", help="(50,90,99)")
    add("--save-result", action="store_true", help="as JSON, with vLLM's fields")
    add("--save-detailed", action="store_true", help="with the times and texts of every request")
    add("--result-dir", metavar="DIR", help="(the current one)")
    add("--result-filename", metavar="NAME", help="default: made of the options and the time")
    add("--label", help="begins the file's name; default: the backend")
    add("--metadata", type=_pair, nargs="+", metavar="KEY=VALUE", help="written into the result")
    add("--disable-tqdm", action="store_true", help="no progress bar")


def _add_compare(group: Any) -> None:
    add = group.add_argument
    add("--compare", action="store_true", help="measure without and with drafting; writes comparison.json and .png")
    add("--concurrencies", type=_counts, metavar="NUMBERS", help="requests at a time, one after the other (1,2,4,8)")
    add("--baseline-url", metavar="URL", help="a server that does not draft; the one of --base-url does")
    add("--speculative-config", "-sc", type=json_object, metavar="JSON", help="start both servers, of --model")
    add("--serve-args", metavar="TEXT", help="more flags of `draftsmith serve` for both, such as '--engine vllm'")
    add("--together", action="store_true", default=None,
        help="start both at once and measure them in turn; else one after the other")  # fmt: skip
    add("--ready-check-timeout-sec", type=_positive, default=600.0, help="until they are ready (%(default)g)")


# ------------------------------------------------------------------------------------------------ values


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1, got {text}")
    return int(text)


def _count_or_rows(text: str) -> int:
    return -1 if text == "-1" else _count(text)


def _counts(text: str) -> list[int]:
    return sorted({_count(each.strip()) for each in text.split(",")})


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise argparse.ArgumentTypeError(f"expected a number above 0, or inf, got {text}")
    return value


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not (equals and key.strip()):
        raise argparse.ArgumentTypeError(f"expected KEY=VALUE, got {text}")
    return key.strip(), value.strip()


def _metrics(text: str) -> tuple[str, ...]:
    names = tuple(each.strip() for each in text.split(","))
    if unknown := [name for name in names if name not in LATENCIES]:
        raise argparse.ArgumentTypeError(f"there is no {unknown[0]!r}; expected some of {', '.join(LATENCIES)}")
    return names


def _percentiles(text: str) -> tuple[float, ...]:
    try:
        values = tuple(float(each) for each in text.split(","))
    except ValueError:
        values = (-1.0,)
    if not all(0 <= value <= 100 for value in values):
        raise argparse.ArgumentTypeError(f"expected numbers from 0 to 100 with commas between them, got {text}")
    return values
