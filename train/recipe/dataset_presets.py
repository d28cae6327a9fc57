"""Public data sets by name: where each lies on the Hub, and which of its columns hold what.

A preset is a short way of writing a source; every key of it can be written by hand. Knows names only, no library and
no file. `python -m train.recipe.dataset_presets` prints the table of docs/data.md.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Preset:
    """`columns` are those of a recipe's `columns:`; `slices` the splits there are besides `split`."""

    name: str
    about: str
    columns: dict[str, Any]
    split: str = "train"
    config: str | None = None
    slices: tuple[str, ...] = field(default=())


_SHAREGPT = {"messages": "conversations"}  # turns as {from, value}
_ANSWERED = {"user": "instruction", "assistant": "output"}

PRESETS: dict[str, Preset] = {
    "sharegpt": Preset("Aeala/ShareGPT_Vicuna_unfiltered", "chats of users with ChatGPT, many turns", _SHAREGPT),
    "ultrachat": Preset(
        "HuggingFaceH4/ultrachat_200k", "generated chats of several turns", {"messages": "messages"},
        split="train_sft", slices=("test_sft",),
    ),
    "magpie": Preset(
        "Magpie-Align/Magpie-Llama-3.1-Pro-300K-Filtered", "instructions written by Llama 3.1 70B", _SHAREGPT
    ),
    "magpie-qwen2.5": Preset(
        "Magpie-Align/Magpie-Qwen2.5-Pro-300K-Filtered", "instructions written by Qwen 2.5 72B", _SHAREGPT
    ),
    "open-perfectblend": Preset(
        "mlabonne/open-perfectblend", "chat, mathematics, code and instructions, mixed", _SHAREGPT
    ),
    "openhermes": Preset("teknium/OpenHermes-2.5", "a million instructions, with system prompts", _SHAREGPT),
    "gsm8k": Preset(
        "openai/gsm8k", "word problems with worked answers", {"user": "question", "assistant": "answer"},
        config="main", slices=("test",),
    ),
    "codealpaca": Preset("sahil2801/CodeAlpaca-20k", "short programming tasks", _ANSWERED | {"input": "input"}),
    "magicoder-evol": Preset(
        "ise-uiuc/Magicoder-Evol-Instruct-110K", "programming tasks made harder step by step",
        {"user": "instruction", "assistant": "response"},
    ),
    "magicoder-oss": Preset(
        "ise-uiuc/Magicoder-OSS-Instruct-75K", "programming tasks after open-source code",
        {"user": "problem", "assistant": "solution"},
    ),
    "opencodeinstruct": Preset(
        "nvidia/OpenCodeInstruct", "five million programming tasks with tests", {"user": "input", "assistant": "output"}
    ),
}  # fmt: skip


def markdown() -> str:
    """The presets as a table."""
    lines = ["| preset | on the Hub | split | columns |", "| --- | --- | --- | --- |"]
    for key, preset in PRESETS.items():
        split = f"`{preset.split}`" + "".join(f", `{other}`" for other in preset.slices)
        config = f" (`config: {preset.config}`)" if preset.config else ""
        columns = ", ".join(f"{ours}: {theirs}" for ours, theirs in preset.columns.items())
        lines.append(f"| `{key}` | {preset.name}{config}: {preset.about} | {split} | `{{{columns}}}` |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(markdown(), end="")
