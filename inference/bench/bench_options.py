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
    """Measure how fast a server answers, and what drafting gains."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    base_url: tuple[str, ...] = option((), "the server, in place of --host and --port")
    host: str = "127.0.0.1"
    port: int = 8000
    backend: Literal["openai", "vllm", "openai-chat"] | None = option(
        None, "openai, vllm: completions, the default of random; openai-chat: chats, of the others"
    )
    model: str | None = option(None, "name of the model; default: the server's first")
    tokenizer: str | None = option(None, "of random; folder or id; default: the model's")
    trust_remote_code: bool = option(False, "run the tokenizer repository's code")

    dataset_name: str = Field(
        description=f"random: for load only; custom: a file of yours; or {', '.join(SUITES)}"
    )
    dataset_path: str | None = option(None, "JSONL of custom (prompt or messages) or of a suite")
    num_prompts: PositiveInt = option(1000, "requests; a shorter file is repeated")
    seed: int = option(0, "of prompts, arrivals and sampling")
    output_len: PositiveInt = option(256, "most tokens of an answer")
    random_input_len: PositiveInt = option(1024, "tokens")
    random_output_len: PositiveInt = option(128, "tokens")

    request_rate: PositiveFloat = option(math.inf, "requests/s; inf: all at once")
    max_concurrency: PositiveInt | None = option(None, "most running requests; the others wait")
    temperature: float | None = option(None, "default: the server's")
    ignore_eos: bool = option(False, "write all tokens up to the limit; random always does")
    extra_body: JsonObject = option({}, "added to every request, such as its top_p")

    save_result: bool = option(False, "as JSON, with vLLM's fields")
    result_dir: str = option(".", "folder of bench.json and comparison.json")

    baseline_url: str | None = option(
        None, "a server without drafting: compare those of --base-url with it, in turn"
    )
    draft_lengths: Annotated[tuple[NonNegativeInt, ...], CommaSeparated] = option(
        (), "every K to ask the server for (draftsmith serve); default: its own"
    )
    concurrencies: Annotated[tuple[PositiveInt, ...], CommaSeparated] = option(
        (1, 2, 4, 8), "levels of concurrency"
    )
    repeats: PositiveInt = option(1, "of every measurement; a gain's range is over them")

    @property
    def url(self) -> str:
        """The server's address."""
        return self.base_url[0] if self.base_url else f"http://{self.host}:{self.port}"

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
        if self.dataset_name not in ("random", "custom", *SUITES):
            raise ValueError(f"--dataset-name {self.dataset_name}: there is none of this name")
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
