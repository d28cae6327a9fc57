"""Helpers of the measuring scripts: peak memory, fresh processes, a random job to train, tables."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from rich.box import SIMPLE_HEAD
from rich.table import Table
from transformers import AutoModelForCausalLM, Qwen3Config

from draftsmith.inference.whole_file import write_whole
from draftsmith.speculators.registry import family_class
from draftsmith.speculators.target.frozen_target import FrozenTarget
from draftsmith.train.data.loss_mask import TokenRow
from draftsmith.train.data.packing import pack
from draftsmith.train.features.row_features import RowFeatures
from draftsmith.train.features.source import InProcess
from draftsmith.train.recipe.drafter_config import drafter_config
from draftsmith.train.recipe.recipe import Recipe
from draftsmith.train.trainer.trainer import Trainer

# Sizes of a Qwen3Config: those of Qwen3-8B, and some that a CPU computes at once.
QWEN3_8B = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
}
TINY_QWEN3 = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
    "max_position_embeddings": 512,
}


def with_peak_memory(
    work: Callable[[], Any], device: str = "cpu", pid: int | str = "self"
) -> tuple[Any, int]:
    """Calls `work()`; returns its result and the peak of memory in bytes above what was held before
    (CPU: Linux). `pid`: the process whose memory it is, on a CPU."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = work()
        return result, torch.cuda.max_memory_allocated() - before
    Path(f"/proc/{pid}/clear_refs").write_text("5")  # resets VmHWM
    before = _resident("VmRSS", pid)
    result = work()
    return result, _resident("VmHWM", pid) - before


def _resident(name: str, pid: int | str) -> int:
    """Resident memory of a process in bytes; VmRSS: now, VmHWM: its peak."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def library_environment(threads: int) -> dict[str, str]:
    """The environment of a process that runs the peer's library in its own interpreter."""
    # They would put this project into the library's place.
    hidden = {"PYTHONPATH", "PYTHONSAFEPATH"}
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    return environment | {
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def random_target(config: Mapping[str, int], device: torch.device | str, dtype: str) -> Any:
    """A random Qwen3, its weights made on the device."""
    torch.manual_seed(0)
    whole = Qwen3Config(**config, tie_word_embeddings=False, eos_token_id=None, pad_token_id=0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(whole, dtype=getattr(torch, dtype)).eval()


def make_trainer(
    recipe: Recipe, model: Any, rows: Sequence[TokenRow], accelerator: Accelerator, folder: Path
) -> Any:
    """A Trainer of the recipe's head over a transformers model and rows of tokens."""
    probe = FrozenTarget(model)
    config = drafter_config(recipe, probe)
    target = FrozenTarget(model, config.tap_layers)
    probe.close()
    torch.manual_seed(0)
    drafter = family_class(recipe.family)(config).attach(target).to(accelerator.device)
    drafter.initialise_from(target, recipe.drafter)
    packed = pack(rows, recipe.data.max_length)
    # one after the other, so that a phase is timed alone
    features = RowFeatures(InProcess(target), packed, overlaps=False)
    return Trainer(recipe, target, drafter, features, accelerator=accelerator, folder=folder)


def table(title: str, *headings: str, left: int = 1) -> Table:
    """A table for the terminal, of which the first `left` columns are text and the others
    numbers."""
    table_ = Table(
        title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False
    )
    for i, heading in enumerate(headings):
        table_.add_column(heading, justify="left" if i < left else "right", overflow="fold")
    return table_


def markdown(headings: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """A Markdown table, of which the first `left` columns are text and the others numbers."""
    rule = ["---" if i < left else "---:" for i in range(len(headings))]
    return "".join("| " + " | ".join(line) + " |\n" for line in (headings, rule, *rows))


def save_json(path: Path, data: Mapping[str, Any]) -> None:
    """Writes a file of JSON, whole or not at all."""
    write_whole(path, json.dumps(data, indent=1) + "\n")
