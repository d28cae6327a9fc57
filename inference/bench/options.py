"""The options of `bench`: each is declared once, as a field whose name is the flag's. They are
those of `vllm bench serve`; `--compare` and its options are this project's. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from inference.bench.figures import LATENCIES
from inference.evaluation.suites import SUITES
from inference.flags import FlagParser, JsonObject, add_flags, flag_name, spelled, validated

ROUTES = {
    "openai": "/v1/completions",
    "vllm": "/v1/completions",
    "openai-chat": "/v1/chat/completions",
}
FILES = ("custom", *SUITES)
SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
)
COMPARING = (
    "baseline_url",
    "speculative_config",
    "serve_args",
    "concurrencies",
    "together",
    "repeats",
    "draft_lengths",
)
SHAPES = ("speculative_token_tree", "speculative_eagle_topk")  # drafts that are no chain
GROUPS = {  # in --help, by their first option
    "backend": "server",
    "dataset_name": "prompts",
    "request_rate": "load",
    "temperature": "sampling; the server decides what is not given",
    "percentile_metrics": "results",
    "compare": "drafting off and on",
}

Metric = Literal["ttft", "tpot", "itl", "e2el", "client_queue_time"]
Percent = Annotated[float, Field(ge=0, le=100)]
CommaSeparated = BeforeValidator(
    lambda value: value.split(",") if isinstance(value, str) else value
)


def option(default: Any, description: str = "") -> Any:
    return Field(default, description=description)


class BenchOptions(BaseModel):
    """Options of a measurement."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    backend: Literal["openai", "vllm", "openai-chat"] = option(
        "openai", "openai: completions; openai-chat: chats"
    )
    base_url: str | None = option(None, "the server, in place of --host and --port")
    host: str = "127.0.0.1"
    port: int = 8000
    endpoint: str | None = option(None, "route of the requests; default: the backend's")
    model: str | None = option(
        None, "folder or id of the model, also of its tokenizer; default: the server's first"
    )
    served_model_name: str | None = option(None, "its name at the server; default: --model")
    tokenizer: str | None = option(None, "folder or repository id; default: the model's")
    trust_remote_code: bool = option(False, "run the tokenizer repository's code")
    request_timeout: PositiveFloat = option(6 * 3600.0, "seconds after which a request has failed")

    dataset_name: Literal[
        "random",
        "custom",
        "spec_al",
        "spec_bench",
        "mt_bench",
        "gsm8k",
        "math500",
        "humaneval",
        "mbpp",
        "speed_bench",
    ] = Field(
        description="random: for load only; custom: a file of yours; or a suite (docs/suites.md)"
    )
    dataset_path: str | None = option(
        None, "JSONL of custom (prompt or messages) or of a suite; spec_al: a folder"
    )
    num_prompts: PositiveInt = option(1000, "requests")
    seed: int = option(0, "of prompts, arrivals and sampling")
    output_len: PositiveInt | None = option(None, "most tokens of an answer, for every dataset")
    random_input_len: PositiveInt = option(1024, "tokens")
    random_output_len: PositiveInt = option(128, "tokens")
    random_range_ratio: float = Field(
        0.0, ge=0, lt=1, description="lengths vary by this ratio, up and down"
    )
    random_prefix_len: NonNegativeInt = option(0, "tokens that all prompts begin with, in addition")
    custom_output_len: PositiveInt | Annotated[Literal[-1], BeforeValidator(int)] = option(
        256, "-1: output_tokens of each row"
    )
    spec_bench_category: str | None = option(None, "category of rows, for suites")
    first_turns_only: bool = option(
        False, "send no later turns of a suite's conversations, as vLLM; default: all"
    )
    skip_chat_template: bool = option(False, "with --backend openai: send the messages' plain text")
    disable_shuffle: bool = option(False, "send a file in its order")
    no_oversample: bool = option(False, "send a short file once only")

    request_rate: PositiveFloat = option(math.inf, "requests/s; inf: all at once")
    max_concurrency: PositiveInt | None = option(None, "most running requests; the others wait")
    num_warmups: NonNegativeInt | None = option(
        None, "requests before the measurement; default: 0, with --compare 2"
    )

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool = option(False, "write all tokens up to the limit; random always does")
    extra_body: JsonObject = option({}, "JSON, added to every request")

    percentile_metrics: Annotated[tuple[Metric, ...], CommaSeparated] = option(
        ("ttft", "tpot", "itl", "e2el"), f"comma separated, of {', '.join(LATENCIES)}"
    )
    metric_percentiles: Annotated[tuple[Percent, ...], CommaSeparated] = option(
        (50.0, 90.0, 99.0), "comma separated"
    )
    save_result: bool = option(False, "as JSON, with vLLM's fields")
    save_detailed: bool = option(False, "with the times and texts of every request")
    result_dir: str = option(".")
    result_filename: str | None = option(None, "default: made of the options and the time")
    label: str | None = option(None, "begins the file's name; default: the backend")
    disable_tqdm: bool = option(False, "no progress bar")

    compare: bool = option(False, "measure without and with drafting; writes comparison.json")
    concurrencies: Annotated[tuple[PositiveInt, ...], CommaSeparated] = option(
        (1, 2, 4, 8), "levels of concurrency"
    )
    baseline_url: str | None = option(
        None, "a server that does not draft; the one of --base-url does"
    )
    speculative_config: JsonObject | None = option(
        None, "JSON: start both servers, of --model (-sc)"
    )
    serve_args: str = option(
        "", "more flags of `draftsmith serve` for both, such as '--engine vllm'"
    )
    together: bool = option(
        False, "start all servers and measure them in turn; default: one after the other"
    )
    repeats: PositiveInt = option(1, "of every measurement, in turn; the advice's spread is theirs")
    draft_lengths: Annotated[tuple[NonNegativeInt, ...], CommaSeparated] = option(
        (), "further numbers of drafts to measure; 0: a drafter that never drafts"
    )
    ready_check_timeout_sec: PositiveFloat = option(600.0, "seconds until a server is ready")

    @property
    def url(self) -> str:
        """The server's address, without /v1."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return (self.base_url or f"http://{host}:{self.port}").rstrip("/").removesuffix("/v1")

    @property
    def route(self) -> str:
        return self.endpoint or ROUTES[self.backend]

    @property
    def chat(self) -> bool:
        """The requests hold conversations, and not texts."""
        return self.backend == "openai-chat"

    @property
    def load_only(self) -> bool:
        """The prompts are random tokens, and acceptance on them means nothing."""
        return self.dataset_name == "random"

    @property
    def ignores_eos(self) -> bool:
        return self.ignore_eos or self.load_only

    @property
    def body(self) -> dict[str, Any]:
        """Sampling parameters and other fields that every request holds."""
        return {
            name: value for name in SAMPLING if (value := getattr(self, name)) is not None
        } | self.extra_body

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        given = self.model_fields_set
        if self.route.endswith("/chat/completions") != self.chat:
            raise ValueError(
                f"--endpoint {self.endpoint}: --backend {self.backend} needs {ROUTES[self.backend]}"
            )
        if (self.dataset_path is not None) != (self.dataset_name in FILES):
            wanted = (
                "needs --dataset-path, a JSONL file"
                if self.dataset_path is None
                else "takes no --dataset-path"
            )
            raise ValueError(f"--dataset-name {self.dataset_name} {wanted}")
        if self.chat and self.skip_chat_template:
            raise ValueError(
                "--skip-chat-template needs --backend openai: other servers apply the template"
                " themselves"
            )
        if not self.compare:
            for name in given.intersection(COMPARING):
                raise ValueError(
                    f"{flag_name(name)} belongs to --compare; add it, or leave this out"
                )
            return self
        if (self.baseline_url is None) == (self.speculative_config is None):
            raise ValueError(
                "--compare: give --baseline-url, a server without drafting beside the one of"
                " --base-url, or --speculative-config and --model, with which both are started"
            )
        if self.speculative_config is not None and (
            self.model is None or self.base_url is not None
        ):
            raise ValueError(
                "--compare: --speculative-config starts servers of --model, without --base-url"
            )
        if self.baseline_url is not None and self.serve_args:
            raise ValueError(
                "--compare: --serve-args is for servers started with --speculative-config"
            )
        if self.baseline_url is not None and self.draft_lengths:
            raise ValueError(
                "--compare: --draft-lengths is for servers started with --speculative-config"
            )
        if self.draft_lengths and (
            shape := [name for name in SHAPES if name in (self.speculative_config or {})]
        ):
            raise ValueError(
                f"--draft-lengths are lengths of chains, and {shape[0]} drafts trees; leave one out"
            )
        if "max_concurrency" in given:
            raise ValueError("--compare: give --concurrencies instead of --max-concurrency")
        return self


def read_options(arguments: Sequence[str]) -> BenchOptions:
    """ConfigError for options that are unknown, have a wrong value or contradict each other."""
    parser = FlagParser(
        "bench",
        "%(prog)s --dataset-name NAME [flags]",
        description="Load on an OpenAI-compatible server, as of vllm bench serve.",
    )
    add_flags(parser, BenchOptions, groups=GROUPS)
    return validated(BenchOptions, "bench", vars(parser.parse_args(spelled(arguments))))
