"""The sections of a recipe about text: sources, rows, and regenerated responses."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from speculators.options import Count, PositiveInt, Section, Share, Text


@dataclass(frozen=True)
class Preset:
    """`columns` are those of a recipe's `columns:`; `slices` the splits there are besides
    `split`."""

    name: str
    about: str
    columns: dict[str, Any]
    split: str = "train"
    config: str | None = None
    slices: tuple[str, ...] = field(default=())


_SHAREGPT = {"messages": "conversations"}  # turns as {from, value}
_ANSWERED = {"user": "instruction", "assistant": "output"}

PRESETS: dict[str, Preset] = {
    "sharegpt": Preset(
        "Aeala/ShareGPT_Vicuna_unfiltered", "chats of users with ChatGPT, many turns", _SHAREGPT
    ),
    "ultrachat": Preset(
        "HuggingFaceH4/ultrachat_200k",
        "generated chats of several turns",
        {"messages": "messages"},
        split="train_sft",
        slices=("test_sft",),
    ),
    "magpie": Preset(
        "Magpie-Align/Magpie-Llama-3.1-Pro-300K-Filtered",
        "instructions written by Llama 3.1 70B",
        _SHAREGPT,
    ),
    "magpie-qwen2.5": Preset(
        "Magpie-Align/Magpie-Qwen2.5-Pro-300K-Filtered",
        "instructions written by Qwen 2.5 72B",
        _SHAREGPT,
    ),
    "open-perfectblend": Preset(
        "mlabonne/open-perfectblend", "chat, mathematics, code and instructions, mixed", _SHAREGPT
    ),
    "openhermes": Preset(
        "teknium/OpenHermes-2.5", "a million instructions, with system prompts", _SHAREGPT
    ),
    "gsm8k": Preset(
        "openai/gsm8k",
        "word problems with worked answers",
        {"user": "question", "assistant": "answer"},
        config="main",
        slices=("test",),
    ),
    "codealpaca": Preset(
        "sahil2801/CodeAlpaca-20k", "short programming tasks", _ANSWERED | {"input": "input"}
    ),
    "magicoder-evol": Preset(
        "ise-uiuc/Magicoder-Evol-Instruct-110K",
        "programming tasks made harder step by step",
        {"user": "instruction", "assistant": "response"},
    ),
    "magicoder-oss": Preset(
        "ise-uiuc/Magicoder-OSS-Instruct-75K",
        "programming tasks after open-source code",
        {"user": "problem", "assistant": "solution"},
    ),
    "opencodeinstruct": Preset(
        "nvidia/OpenCodeInstruct",
        "five million programming tasks with tests",
        {"user": "input", "assistant": "output"},
    ),
}


def markdown() -> str:
    """The presets as a table."""
    lines = ["| preset | on the Hub | split | columns |", "| --- | --- | --- | --- |"]
    for key, preset in PRESETS.items():
        split = f"`{preset.split}`" + "".join(f", `{other}`" for other in preset.slices)
        config = f" (`config: {preset.config}`)" if preset.config else ""
        columns = ", ".join(f"{ours}: {theirs}" for ours, theirs in preset.columns.items())
        lines.append(
            f"| `{key}` | {preset.name}{config}: {preset.about} | {split} | `{{{columns}}}` |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(markdown(), end="")


Dtype = Literal["auto", "float32", "bfloat16", "float16"]


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
    layouts = [name for name in ("messages", "user", "prompt") if name in columns]
    if len(layouts) != 1:
        given = " and ".join(layouts) or "none"
        raise ValueError(f"expected exactly one of messages, user, prompt, got {given}")
    for name in columns:
        if (other := COLUMNS[name]) and other not in columns:
            raise ValueError(f"{name} needs {other}")
    if "prompt" in columns and "system" in columns:
        raise ValueError("system has no meaning beside prompt, which is continued as it is")
    return columns


Columns = Annotated[dict[str, Text], AfterValidator(check_columns)]


_KINDS = ("path", "name", "preset")


class Source(Section):
    """One source of examples: exactly one of path, name, preset (a preset may have a path beside
    it)."""

    path: Text | None = Field(
        None,
        description=(
            "a .jsonl, .json or .parquet file (or .gz, .bz2, .zst), a folder of them, or a saved"
            " dataset"
        ),
    )
    name: Text | None = Field(None, description="a dataset id on the Hugging Face hub")
    preset: Text | None = Field(
        None,
        description=(
            f"a known data set with its columns: {', '.join(PRESETS)}; with path: a local copy"
            " of it"
        ),
    )
    config: Text | None = Field(
        None, description="configuration of a hub dataset; null: its default"
    )
    revision: Text | None = Field(
        None, description="revision of a hub dataset; null: the default branch"
    )
    split: Text | None = Field(
        None, description="split or slice, such as train[:1%]; null: train, or the preset's"
    )
    streaming: bool = Field(
        False, description="read a hub dataset as it is downloaded, up to `limit` examples"
    )
    shuffle_buffer: PositiveInt | None = Field(
        None, description="with streaming: rows of the buffer that is drawn from; null: in order"
    )
    field: Literal["auto", "messages", "conversations", "completion"] = Field(
        "auto",
        description=(
            "messages: OpenAI's, conversations: ShareGPT's, completion: with prompt; auto: what the"
            " row has"
        ),
    )
    columns: Columns | None = Field(
        None,
        description=(
            "columns of other names, such as {user: instruction, input: context, assistant: output}"
            " (also reasoning, system), {messages: turns} or {prompt: text, completion: rest}, and"
            " tools, workload; null: those of `field`, or the preset's"
        ),
    )
    workload: Text | None = Field(
        None,
        description=(
            "label in reports; null: the row's `workload`, else the file, dataset or preset name"
        ),
    )
    weight: float = Field(
        1.0, gt=0, description="uses of each example per epoch; a fraction is a seeded sample"
    )
    share: float | None = Field(
        None,
        gt=0,
        le=1,
        description=(
            "fraction of all examples, instead of a weight; the mixture is the largest that repeats"
            " none"
        ),
    )
    limit: PositiveInt | None = Field(None, description="use at most this many examples; null: all")

    @model_validator(mode="after")
    def _one_kind(self) -> Source:
        kinds = [kind for kind in _KINDS if getattr(self, kind) is not None]
        if kinds == ["path", "preset"]:
            kinds = ["path"]
        if len(kinds) != 1:
            raise ValueError(
                f"expected exactly one of {', '.join(_KINDS)}, got {' and '.join(kinds) or 'none'}"
            )
        if self.preset is not None and self.preset not in PRESETS:
            raise ValueError(f"preset: expected one of {', '.join(PRESETS)}, got '{self.preset}'")
        for option in ("config", "revision", "streaming"):
            if self.path is not None and getattr(self, option):
                raise ValueError(f"{option} has no meaning for a path source")
        if self.columns is not None and self.field != "auto":
            raise ValueError("field and columns say the same; give one")
        if self.share is not None and self.weight != 1:
            raise ValueError("share and weight say two things about the mixture; give one")
        self._check_streaming()
        return self

    def _check_streaming(self) -> None:
        if self.shuffle_buffer is not None and not self.streaming:
            raise ValueError(
                "shuffle_buffer needs streaming: true; without it all rows are read, and shuffled"
                " later"
            )
        if self.streaming and self.limit is None:
            raise ValueError(
                "streaming needs a limit: examples are kept in memory, and a data set may be"
                " endless"
            )
        if self.streaming and "[" in (self.split or ""):
            raise ValueError(f"split: a stream has no slices, got '{self.split}'; use limit")

    @property
    def label(self) -> str:
        """The name of this source in error messages and progress bars."""
        return self.path or self.name or self.preset or ""

    def resolved(self) -> Source:
        """The source with its preset written out."""
        if self.preset is None:
            return self
        known = PRESETS[self.preset]
        own: dict[str, Any] = {}
        if self.path is None:
            own = {
                "name": known.name,
                "config": self.config or known.config,
                "split": self.split or known.split,
            }
        if self.columns is None and self.field == "auto":
            own["columns"] = dict(known.columns)
        return self.model_copy(
            update={"preset": None, "workload": self.workload or self.preset, **own}
        )


def check_mixture(sources: list[Source]) -> list[Source]:
    """ValueError unless all sources have shares that add up to 1, or none has one."""
    shares = [source.share for source in sources if source.share is not None]
    if shares and len(shares) < len(sources):
        raise ValueError("some sources have a share and some have none; give all of them one")
    if shares and abs(sum(shares) - 1) > 1e-6:
        raise ValueError(f"expected shares of sources that add up to 1, got {sum(shares):g}")
    return sources


Sources = Annotated[list[Source], AfterValidator(check_mixture)]


class DataSection(Section):
    """Conversations, and how they become token rows."""

    train: Sources = Field(min_length=1, description="sources of the examples to train on")
    validation: Sources = Field(
        [], description="held-out sources for evaluation during training; empty: none is made"
    )
    max_length: Annotated[int, Field(ge=8)] = Field(
        2048, description="tokens of a packed row; longer conversations are cut and counted"
    )
    chat_template: Text | None = Field(
        None,
        description=(
            "file with a Jinja template in place of the tokenizer's; serving must use the same"
        ),
    )
    chat_template_kwargs: dict[str, Any] = Field(
        {}, description="variables of the template, such as enable_thinking: false"
    )
    reasoning: Literal["keep", "drop"] = Field(
        "keep",
        description="reasoning fields of a turn; keep fails where the template would lose them",
    )
    on_bad_row: Literal["error", "drop"] = Field(
        "error",
        description=(
            "for a conversation whose mask cannot be proved; damaged rows are always left out and"
            " listed"
        ),
    )
    max_bad_rows: Count | None = Field(
        None, description="stop once more rows of a list of sources are bad; null: never"
    )
    max_bad_share: Share | None = Field(
        None, description="stop if a larger fraction of the rows is bad; null: never"
    )
    fan_out: bool = Field(
        False,
        description=(
            "one example per assistant turn, each written anew by the target; off: the last turn"
            " only"
        ),
    )
    deduplicate: Literal["off", "exact"] = Field(
        "exact",
        description="leave out repeated prompts (without regeneration: prompts and responses)",
    )
    decontaminate: Literal["off", "exact", "ngram"] = Field(
        "exact",
        description=(
            "leave out examples with a prompt of the evaluation; ngram: or a run of its words"
        ),
    )


class TemperatureShare(Section):
    """Part of the responses that is written at one temperature."""

    temperature: float = Field(ge=0, description="sampling temperature; 0 is greedy")
    share: float = Field(
        gt=0, le=1, description="fraction of the conversations written at this temperature"
    )


def read_shares(value: Any) -> Any:
    """The short ways of writing `temperatures` as a list of shares: 1.0, [0.0, 1.0] or {0.0: 0.3,
    1.0: 0.7}."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = [value]
    if isinstance(value, dict):
        return [{"temperature": t, "share": share} for t, share in value.items()]
    if isinstance(value, list) and value and all(type(t) in (int, float) for t in value):
        return [{"temperature": t, "share": 1 / len(value)} for t in value]
    return value


def check_shares(value: list[TemperatureShare]) -> list[TemperatureShare]:
    """ValueError unless they add up, each temperature given once."""
    total = sum(entry.share for entry in value)
    if abs(total - 1) > 1e-6:
        raise ValueError(f"expected shares that add up to 1, got {total:g}")
    if len({entry.temperature for entry in value}) != len(value):
        raise ValueError("each temperature may be given once")
    return value


def spread(shares: list[TemperatureShare], count: int) -> list[float]:
    """The temperature of each of `count` examples: the shares, spread evenly and in a fixed
    order."""
    counts = [0.0] * len(shares)
    chosen = []
    for i in range(count):
        behind = [entry.share * (i + 1) - number for entry, number in zip(shares, counts)]
        index = max(range(len(behind)), key=behind.__getitem__)
        counts[index] += 1
        chosen.append(shares[index].temperature)
    return chosen


Shares = Annotated[
    list[TemperatureShare], BeforeValidator(read_shares), AfterValidator(check_shares)
]


class EndpointSection(Section):
    """One server that writes responses, compatible with OpenAI's."""

    url: str = Field(
        pattern=r"^https?://[^\s/]+(/\S*)?$", description="its address, such as http://host:8000/v1"
    )
    model: Text | None = Field(
        None, description="name it serves the target under; null: target.model, or its only one"
    )
    api_key_env: Text | None = Field(
        None, description="environment variable that holds its key; null: it asks none"
    )
    max_concurrency: PositiveInt = Field(
        64, description="requests under way at a time; a server's max_num_seqs fits"
    )

    @model_validator(mode="before")
    @classmethod
    def _url_alone(cls, value: Any) -> Any:
        return {"url": value} if isinstance(value, str) else value


class RegenerateSection(Section):
    """Responses rewritten by the target itself: without it a head learns another model's habits."""

    # These keys change who writes, not the text: a run may be continued with other values.
    operational: ClassVar[frozenset[str]] = frozenset({"endpoints"})
    enabled: bool = Field(
        True, description="replace every response by the target's own; off: train on the data as is"
    )
    temperatures: Shares = Field(
        [TemperatureShare(temperature=1.0, share=1.0)],
        min_length=1,
        description=(
            "[1.0], a list in equal parts, or {temperature: fraction}; use those of serving"
        ),
    )
    top_p: float = Field(1.0, gt=0, le=1, description="nucleus of the sampling; 1: off")
    top_k: Count = Field(0, description="most likely tokens kept; 0: off")
    max_new_tokens: PositiveInt = Field(512, description="longest response")
    batch_size: PositiveInt = Field(32, description="conversations decoded together")
    seed: Count = Field(0, description="seed of the sampling")
    cache_dir: Text | None = Field(
        None, description="where responses are kept; null: <output_dir>/responses"
    )
    turns: Literal["last", "all"] = Field(
        "last",
        description=(
            "last: the last response, after the data's own earlier ones; all: each, after those"
            " written before"
        ),
    )
    endpoints: list[EndpointSection] = Field(
        [],
        description=(
            "servers that write the responses, each a URL or a mapping; empty: this process"
        ),
    )

    @model_validator(mode="after")
    def _each_once(self) -> RegenerateSection:
        urls = [endpoint.url.rstrip("/") for endpoint in self.endpoints]
        if len(set(urls)) < len(urls):
            raise ValueError(f"endpoints: each address may be given once, got {', '.join(urls)}")
        return self
