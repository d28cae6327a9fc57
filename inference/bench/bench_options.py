"""The options of `bench`: each is declared once, as a field whose name is the flag's. They are
those of `vllm bench serve`; `--baseline-url` and what follows are this project's. Imports no
torch."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from draftsmith.inference.engine_options import option
from draftsmith.inference.evaluation.suites import SUITES
from draftsmith.inference.flags import CommaSeparated, JsonObject


class BenchOptions(BaseModel):
    """Measure how fast a server answers. With --baseline-url also what drafting gains, at rising
    concurrency, and which number of drafts pays. Options are those of `vllm bench serve`; the last
    four are of the comparison. Exit code 1: a request failed."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    base_url: tuple[str, ...] = option(
        (),
        "address of the server, such as http://127.0.0.1:8000, in place of --host and --port;"
        " several with --baseline-url only",
    )
    host: str = option("127.0.0.1", "host of the server")
    port: int = option(8000, "port of the server", ge=1, le=65535)
    backend: Literal["openai", "vllm", "openai-chat"] | None = option(
        None,
        "what the server is sent: openai, vllm: texts to go on with (/v1/completions);"
        " openai-chat: conversations (/v1/chat/completions); default: openai for --dataset-name"
        " random, openai-chat for the others",
    )
    model: str | None = option(
        None, "name by which the server knows its model; default: the first that it serves"
    )
    tokenizer: str | None = option(
        None,
        "folder or repository id of a tokenizer, from which --dataset-name random draws its tokens;"
        " default: --model",
    )
    trust_remote_code: bool = option(False, "run Python code of the tokenizer's repository")

    dataset_name: str = Field(
        description="prompts to send: random: drawn tokens, for load alone, since acceptance on"
        " them says nothing; custom: a file of yours; or those of a benchmark:"
        f" {', '.join(SUITES)}"
    )
    dataset_path: str | None = option(
        None,
        "file of the prompts, a JSON object a line: of custom with `prompt`, a text, or `messages`,"
        " a conversation; of a benchmark as it is published",
    )
    num_prompts: PositiveInt = option(
        1000, "requests to send; the prompts of a file with fewer are repeated"
    )
    seed: NonNegativeInt = option(0, "of the order of prompts, their arrival, and sampling")
    output_len: PositiveInt = option(256, "most tokens of an answer to any but a random prompt")
    random_input_len: PositiveInt = option(1024, "tokens of each random prompt")
    random_output_len: PositiveInt = option(128, "tokens of each answer to a random prompt")

    request_rate: PositiveFloat = option(
        math.inf, "requests per second, on average, at random times; inf: all at once"
    )
    max_concurrency: PositiveInt | None = option(
        None, "most requests under way at a time; the others wait; default: no limit"
    )
    temperature: float | None = option(
        None, "sampling temperature of the answers; 0 is greedy; default: the server's"
    )
    ignore_eos: bool = option(
        False,
        "do not end an answer where the model would, but at the most tokens; random always does",
    )
    extra_body: JsonObject = option(
        {}, "fields that are added to every request, such as '{\"top_p\": 0.9}'"
    )

    save_result: bool = option(
        False, "write the result to bench.json, with vLLM's names; a comparison is always written"
    )
    result_dir: str = option(".", "folder of bench.json, and of comparison.json")

    baseline_url: str | None = option(
        None,
        "address of a server of the same model that does not draft; servers of --base-url are"
        " compared with it, in turn",
    )
    draft_lengths: Annotated[tuple[NonNegativeInt, ...], CommaSeparated] = option(
        (),
        "numbers of drafts per round to compare, such as 2,4,8: `draftsmith serve` takes one with"
        " each request; default: what each server has",
    )
    concurrencies: Annotated[tuple[PositiveInt, ...], CommaSeparated] = option(
        (1, 2, 4, 8), "numbers of requests under way at which the servers are compared"
    )
    repeats: PositiveInt = option(
        1, "times that each measurement of a comparison is made; a gain's range is over them"
    )

    @property
    def url(self) -> str:
        """The server's address."""
        if self.base_url:
            return self.base_url[0]
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    @property
    def random(self) -> bool:
        """The prompts are random tokens, and acceptance on them means nothing."""
        return self.dataset_name == "random"

    @property
    def chat(self) -> bool:
        """The requests hold conversations, and not texts."""
        return not self.random if self.backend is None else self.backend == "openai-chat"

    @property
    def body(self) -> dict[str, Any]:
        """Fields that every request holds, besides the prompt and its length."""
        body: dict[str, Any] = {}
        if self.temperature is not None:
            body["temperature"] = self.temperature
        if self.ignore_eos or self.random:
            body["ignore_eos"] = True
        return body | self.extra_body

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        names = ("random", "custom", *SUITES)
        if self.dataset_name not in names:
            expected = ", ".join(names)
            raise ValueError(f"--dataset-name {self.dataset_name}: expected one of {expected}")
        if not self.random and self.dataset_path is None:
            raise ValueError(f"--dataset-name {self.dataset_name}: needs --dataset-path, a file")
        if self.random and self.chat:
            raise ValueError(
                "--backend openai-chat: random prompts are token ids, which completions take and"
                " chats do not; give --backend openai, or another --dataset-name"
            )
        if self.random and not (self.model or self.tokenizer):
            raise ValueError(
                "--dataset-name random: its tokens are drawn from a vocabulary; give --model or"
                " --tokenizer, whose vocabulary it is"
            )
        if self.baseline_url is not None and not self.base_url:
            raise ValueError("--baseline-url: give --base-url, servers that draft")
        compared = self.model_fields_set & {"draft_lengths", "concurrencies", "repeats"}
        if self.baseline_url is None and (compared or len(self.base_url) > 1):
            raise ValueError("several servers or measurements need --baseline-url")
        return self
