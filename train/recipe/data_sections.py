"""The sections of a recipe about text: sources, rows, and regenerated responses."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, Strict, field_validator, model_validator

from draftsmith.inference.report.schema import ALL_WORKLOADS
from draftsmith.speculators.hub import split_revision
from draftsmith.speculators.options import Count, NonEmptyText, PositiveInt, Section, Share

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
CREDENTIALS = re.compile(r"(?<=://)[^/\s]+@")  # that an address has before its host

_SHAREGPT = {"messages": "conversations"}  # turns as {from, value}

# Public data sets by a short name, which stands for these keys of a source.
PRESETS: dict[str, dict[str, Any]] = {
    "sharegpt": {"name": "Aeala/ShareGPT_Vicuna_unfiltered", "columns": _SHAREGPT},
    "ultrachat": {"name": "HuggingFaceH4/ultrachat_200k", "split": "train_sft"},
    "magpie": {
        "name": "Magpie-Align/Magpie-Llama-3.1-Pro-300K-Filtered",
        "columns": _SHAREGPT,
    },
    "magpie-qwen2.5": {
        "name": "Magpie-Align/Magpie-Qwen2.5-Pro-300K-Filtered",
        "columns": _SHAREGPT,
    },
    "open-perfectblend": {"name": "mlabonne/open-perfectblend", "columns": _SHAREGPT},
    "openhermes": {"name": "teknium/OpenHermes-2.5", "columns": _SHAREGPT},
    "gsm8k": {
        "name": "openai/gsm8k",
        "config": "main",
        "columns": {"user": "question", "assistant": "answer"},
    },
    "codealpaca": {
        "name": "sahil2801/CodeAlpaca-20k",
        "columns": {"user": "instruction", "input": "input", "assistant": "output"},
    },
    "magicoder-evol": {
        "name": "ise-uiuc/Magicoder-Evol-Instruct-110K",
        "columns": {"user": "instruction", "assistant": "response"},
    },
    "magicoder-oss": {
        "name": "ise-uiuc/Magicoder-OSS-Instruct-75K",
        "columns": {"user": "problem", "assistant": "solution"},
    },
    "opencodeinstruct": {
        "name": "nvidia/OpenCodeInstruct",
        "columns": {"user": "input", "assistant": "output"},
    },
}

COLUMNS = {  # what `columns` may name, and what it needs beside it
    "messages": "",
    "user": "",
    "input": "user",
    "assistant": "user",
    "reasoning": "assistant",
    "system": "",
    "prompt": "",
    "completion": "prompt",
    "tools": "",
    "workload": "",
}


def check_columns(columns: dict[str, str]) -> dict[str, str]:
    """ValueError unless the names are known, one of them decides what a row is, and each has what
    it needs beside it."""
    if unknown := sorted(set(columns) - set(COLUMNS)):
        raise ValueError(f"expected names of {', '.join(COLUMNS)}, got {', '.join(unknown)}")
    if len(columns.keys() & {"messages", "user", "prompt"}) != 1:
        raise ValueError("expected exactly one of messages, user, prompt")
    for name in columns:
        if (other := COLUMNS[name]) and other not in columns:
            raise ValueError(f"{name} needs {other}")
    return columns


Columns = Annotated[dict[str, NonEmptyText], AfterValidator(check_columns)]


class Source(Section):
    """One source of examples: a path or a name."""

    path: NonEmptyText | None = None
    """a .jsonl, .json, .csv (or .gz, .bz2, .zst) or .parquet file, a folder of them, or a saved
    dataset"""
    name: NonEmptyText | None = Field(
        None,
        description=(
            "a dataset id on the Hugging Face hub, org/name or org/name@revision, or a known data"
            f" set with its columns: {', '.join(PRESETS)}"
        ),
    )
    config: NonEmptyText | None = None
    """configuration of a hub dataset; null: its default"""
    split: NonEmptyText | None = None
    """split or slice, such as train[:1%]; null: train, or the known set's"""
    streaming: bool = False
    """read a hub dataset as it is downloaded, shuffled, up to `limit` examples"""
    columns: Columns | None = None
    """columns of other names, such as {user: instruction, input: context, assistant: output} (also
    reasoning, system), {messages: turns} or {prompt: text, completion: rest}, and tools, workload;
    null: messages, conversations or prompt and completion"""
    workload: NonEmptyText | None = None
    """label in reports; null: the row's `workload`, else the file or dataset name"""
    weight: float = Field(1.0, gt=0)
    """uses of each example per epoch; a fraction is a seeded sample"""
    limit: PositiveInt | None = None
    """use at most this many examples; null: all"""

    @model_validator(mode="after")
    def _one_kind(self) -> Source:
        if (self.path is None) == (self.name is None):
            raise ValueError("expected exactly one of path, name")
        if self.name is not None and "/" not in self.name and self.name not in PRESETS:
            raise ValueError(
                f"name: expected org/name or one of {', '.join(PRESETS)}, got '{self.name}'"
            )
        if self.streaming and (self.limit is None or "[" in (self.split or "")):
            raise ValueError("streaming: needs a limit, and knows no slices")
        return self

    @field_validator("workload")
    @classmethod
    def _workload_is_not_the_pool(cls, workload: str | None) -> str | None:
        if workload == ALL_WORKLOADS:
            raise ValueError(
                f"{ALL_WORKLOADS} is what reports call all workloads together; give another label"
            )
        return workload

    @property
    def default_workload(self) -> str:
        """The label of rows without one: the name of the file or dataset, with the file's ending or
        the dataset's owner where reports call all workloads together so."""
        name = Path(self.path).name if self.path else self.hub_id[0]
        stem = Path(name).stem
        return name if stem == ALL_WORKLOADS else stem

    @property
    def label(self) -> str:
        """The name of this source in error messages and progress bars."""
        return self.path or self.name or ""

    @property
    def hub_id(self) -> tuple[str, str | None]:
        """(id, revision) of a dataset on the hub."""
        return split_revision(self.name or "")

    def resolved(self) -> Source:
        """The source with the keys of a known data set written out."""
        known = PRESETS.get(self.name or "")
        if known is None:
            return self
        keys = ("config", "split", "columns")
        named = {key: getattr(self, key) for key in keys if getattr(self, key) is not None}
        return self.model_copy(update={"workload": self.workload or self.name, **known, **named})


class DataSection(Section):
    """Conversations, and how they become token rows."""

    train: list[Source] = Field(min_length=1)
    """sources of the examples to train on"""
    validation: list[Source] = Field([])
    """held-out sources for evaluation during training; empty: none is made"""
    max_length: Annotated[int, Field(ge=8)] = 2048
    """tokens of a packed row; longer conversations are cut and counted"""
    chat_template: NonEmptyText | None = None
    """file with a Jinja template in place of the tokenizer's; serving must use the same"""
    chat_template_kwargs: dict[str, Any] = Field({})
    """variables of the template, such as enable_thinking: false"""
    reasoning: Literal["keep", "drop"] = "keep"
    """reasoning fields of a turn; keep fails where the template would lose them"""
    on_bad_row: Literal["error", "drop"] = "error"
    """for a row that is damaged or whose mask cannot be proved; drop: left out, listed with file,
    line and reason"""
    max_bad_row_share: Share = 0.1
    """largest share of bad rows in the training data; beyond it the run stops, since so many are a
    fault of the data or of its description here"""
    decontaminate: bool = True
    """leave out examples with a prompt of the evaluation"""
    num_proc: PositiveInt | None = None
    """processes that render and tokenise examples; null: one per core and 5,000 examples"""


def check_temperatures(value: dict[float, float]) -> dict[float, float]:
    """ValueError unless the fractions add up, and no number is negative."""
    if min(value) < 0 or min(value.values()) <= 0 or abs(sum(value.values()) - 1) > 1e-6:
        raise ValueError(f"expected temperatures >= 0 and fractions that add up to 1, got {value}")
    return value


def deal_temperatures(fractions: dict[float, float], count: int) -> list[float]:
    """The temperature of each of `count` examples, spread evenly and in a fixed order."""
    counts = dict.fromkeys(fractions, 0)
    chosen = []
    for i in range(1, count + 1):
        behind = {t: fraction * i - counts[t] for t, fraction in fractions.items()}
        temperature = max(behind, key=behind.__getitem__)
        counts[temperature] += 1
        chosen.append(temperature)
    return chosen


# Strict floats are no text, which JSON has as keys, and no integers, which YAML has.
Temperatures = Annotated[
    dict[Annotated[float, Strict(False)], float], AfterValidator(check_temperatures)
]


class EndpointSection(Section):
    """One server, compatible with OpenAI's."""

    url: str = Field(pattern=r"^https?://[^\s/]+(/\S*)?$")
    """its address, such as http://host:8000/v1"""
    api_key_env: NonEmptyText | None = None
    """environment variable that holds its key; null: it asks none"""
    max_concurrency: PositiveInt = 64
    """requests under way at a time; a server's max_num_seqs fits"""

    @model_validator(mode="before")
    @classmethod
    def _url_alone(cls, value: Any) -> Any:
        return {"url": value} if isinstance(value, str) else value


class RegenerateSection(Section):
    """Responses rewritten by the target itself: without it a head learns another model's habits."""

    enabled: bool = True
    """replace every response by the target's own; off: train on the data as is"""
    temperatures: Temperatures = Field({1.0: 1.0}, min_length=1)
    """those of serving, each with its fraction of the responses"""
    top_p: float = Field(1.0, gt=0, le=1)
    """nucleus of the sampling; 1: off"""
    top_k: Count = 0
    """most likely tokens kept; 0: off"""
    max_new_tokens: PositiveInt = 512
    """longest response"""
    batch_size: PositiveInt = 32
    """conversations decoded together"""
    cache_dir: NonEmptyText | None = None
    """where responses are kept; null: <output_dir>/responses"""
    turns: Literal["last", "all"] = "last"
    """last: the last response, after the data's own earlier ones; all: each, after those written
    before"""
    endpoints: list[EndpointSection] = Field([])
    """servers that write the responses, each a URL or a mapping; empty: this process"""
