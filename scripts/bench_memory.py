"""Memory of one training step against the length of its row: an EAGLE-3 head on a small random
target, on a CPU.

    python scripts/bench_memory.py --hidden-size 128 --texts 1   # the table of docs/scale.md:
    hours, for its last rows python scripts/bench_memory.py --lengths 2048,4096 --hidden-size 512

Every figure comes from a process of its own: the peak of its resident memory during the step, less
what it held when the step began (Linux). `plain` uses masks and keeps every score and activation;
`chunked` is the default for rows of that length; `+ recomputed` adds
`training.activation_checkpointing`. `plain` is left out where its scores alone exceed --most-gb.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.measuring import in_fresh_process, make_trainer, markdown, with_peak_memory
from speculators.layers import attention
from speculators.target import frozen_target as target_module
from train.data.loss_mask import TokenRow
from train.recipe.recipe import make_recipe

WAYS = {"plain": "plain", "chunked": "chunked", "recomputed": "+ recomputed"}
DEPTHS, HEADS, VOCABULARY = 7, 4, 4096


def one_step(length: int, way: str, hidden_size: int, texts: int) -> tuple[float, float]:
    """(MiB at the peak of a step above those before it, seconds)."""
    if way == "plain":
        attention.KERNELS.clear()
        target_module.LONG_ROW = attention.KEPT_SCORES = attention.SCORES["cpu"] = 1 << 62
    torch.manual_seed(0)
    shape = {
        "hidden_size": hidden_size,
        "intermediate_size": 4 * hidden_size,
        "num_hidden_layers": 4,
    }
    heads = {
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "max_position_embeddings": length,
    }
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **shape, **heads))
    recomputed = way == "recomputed"
    recipe = make_recipe(
        {
            "name": "bench",
            "target": {"model": "random"},
            "data": {"train": [{"path": "none.jsonl"}], "max_length": length},
            "drafter": {
                "unroll_steps": DEPTHS,
                "draft_vocab_size": VOCABULARY // 4,
                "tap_layers": [1, 2, 3],
            },
            "training": {
                "steps": 10,
                "batch_size": 1,
                "mixed_precision": "no",
                "activation_checkpointing": recomputed,
            },
        }
    )
    random, size = np.random.default_rng(0), length // texts
    rows = [
        TokenRow(random.integers(0, VOCABULARY, size), np.arange(size) >= size // 2)
        for _ in range(texts)
    ]
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(recipe, model, rows, Accelerator(cpu=True), Path(folder))
        began = time.monotonic()
        _, peak = with_peak_memory(lambda: trainer.step(0.5).read(DEPTHS))
    return peak / 2**20, time.monotonic() - began


def main(
    lengths: Annotated[
        str, typer.Option(help="Tokens of a row, comma-separated.")
    ] = "2048,4096,8192,16384,32768",
    hidden_size: Annotated[int, typer.Option(help="Width of target and head.")] = 256,
    texts: Annotated[int, typer.Option(help="Texts packed into the row.")] = 4,
    most_gb: Annotated[
        float, typer.Option(help="Largest size of the plain way's scores that is tried.")
    ] = 8.0,
) -> None:
    """Print the peak memory of one training step against the length of its row."""
    # Freed blocks return to the system at once. By default glibc keeps blocks below a limit that
    # grows to 32 MiB in a heap with holes, so that rows whose chunks are just below it take three
    # times what they hold.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(1 << 20)
    headings = ["tokens", *(heading for way in WAYS.values() for heading in (f"{way}, MiB", "s"))]
    print(markdown(headings, [], left=0), end="")
    for length in map(int, lengths.split(",")):
        cells = [f"{length:,}"]
        for way in WAYS:
            scores = (
                2 * DEPTHS * HEADS * length * (length / 2) * 4 / 2**30
            )  # scores and their softmax
            if way == "plain" and scores > most_gb:
                cells += ["—", "—"]
                continue
            mib, seconds = in_fresh_process(one_step, length, way, hidden_size, texts)
            cells += [f"{mib:,.0f}", f"{seconds:.1f}"]
        print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    typer.run(main)
