"""Memory of one training step against the length of its row: an EAGLE-3 head on a small random target, on a CPU.

    python scripts/bench_memory.py --hidden-size 128 --texts 1   # the table of docs/scale.md: hours, for its last rows
    python scripts/bench_memory.py --lengths 2048 4096 --hidden-size 512

Every figure is of a process of its own: the peak of its resident memory during the step less what it held when the step
began (Linux: /proc/self). `plain` is masks, and every score and activation kept; `chunked` is what rows of that length
get; `+ recomputed` has `training.activation_checkpointing` as well. A way whose scores alone exceed --most-gb is left
out.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

WAYS = ("plain", "chunked", "recomputed")
DEPTHS, HEADS, VOCABULARY = 7, 4, 4096
# What is freed goes back at once. By itself glibc keeps blocks below a limit that grows to 32 MiB in a heap with holes,
# and rows whose chunks are just below it take three times what they hold.
RETURNED = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}


def one_step(length: int, way: str, hidden_size: int, texts: int) -> tuple[float, float, float]:
    """(MiB at the peak of a step above those before it, seconds, loss)."""
    from accelerate import Accelerator
    from transformers import LlamaConfig, LlamaForCausalLM

    from speculators.layers import attention
    from speculators.registry import config_for_target, family_class
    from speculators.target import frozen_target as target_module
    from speculators.target.frozen_target import FrozenTarget
    from train.data.loss_mask import TokenRow
    from train.data.packing import pack
    from train.recipe.recipe import make_recipe
    from train.trainer.trainer import Trainer

    if way == "plain":
        target_module.LONG_ROW = attention.KEPT_SCORES = attention.SCORES["cpu"] = 1 << 62
    torch.manual_seed(0)
    sizes = {"hidden_size": hidden_size, "intermediate_size": 4 * hidden_size, "num_hidden_layers": 4}
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": HEADS, "max_position_embeddings": length}
    target = FrozenTarget(LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes, **heads)), [1, 2, 3])
    recipe = make_recipe(
        {
            "name": "bench",
            "target": {"model": "random"},
            "data": {"train": [{"path": "none.jsonl"}], "max_length": length},
            "drafter": {"unroll_steps": DEPTHS, "draft_vocab_size": VOCABULARY // 4, "tap_layers": [1, 2, 3]},
            "training": {
                "steps": 10,
                "batch_size": 1,
                "mixed_precision": "no",
                "activation_checkpointing": way == "recomputed",
            },
        }
    )
    drafter = family_class("eagle3")(
        config_for_target(target, "eagle3", tap_layers=[1, 2, 3], draft_vocab_size=VOCABULARY // 4)
    )
    drafter.attach(target).initialise_from(target)
    random, each = np.random.default_rng(0), length // texts
    rows = [TokenRow(random.integers(0, VOCABULARY, each), np.arange(each) >= each // 2) for _ in range(texts)]
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            recipe, target, drafter, pack(rows, length), accelerator=Accelerator(cpu=True), folder=Path(folder)
        )
        Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten: loading's may be above a step's
        before, began = resident("VmRSS"), time.monotonic()
        loss = trainer.step(0.5)["loss"]
        after = resident("VmHWM")
    return (after - before) / 1024, time.monotonic() - began, loss


def resident(name: str) -> int:
    """KiB: VmRSS, what this process holds now; VmHWM, the most it has held."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096, 8192, 16384, 32768])
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--texts", type=int, default=4, help="texts of a row")
    parser.add_argument("--most-gb", type=float, default=8.0, help="scores of a way that is still tried")
    parser.add_argument("--one", nargs=2, metavar=("LENGTH", "WAY"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(*one_step(int(options.one[0]), options.one[1], options.hidden_size, options.texts))
        return
    print("| tokens | " + " | ".join(f"{way}, MiB | s" for way in ("plain", "chunked", "+ recomputed")) + " |")
    print("| ---: |" + " ---: |" * 2 * len(WAYS))
    for length in options.lengths:
        cells = []
        for way in WAYS:
            scores = 2 * DEPTHS * HEADS * length * (length / 2) * 4 / 2**30  # kept, and the softmax beside them
            if way == "plain" and scores > options.most_gb:
                cells += ["—", "—"]
                continue
            command = [sys.executable, __file__, "--one", str(length), way]
            command += ["--hidden-size", str(options.hidden_size), "--texts", str(options.texts)]
            ran = subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ | RETURNED)
            mib, seconds, _ = map(float, ran.stdout.split())
            cells += [f"{mib:,.0f}", f"{seconds:.1f}"]
        print(f"| {length:,} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
