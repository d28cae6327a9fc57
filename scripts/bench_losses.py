"""Peak memory and time of the chunked objective against the plain one, forward and backward over
all depths.

Each variant runs in a fresh process; its peak is the memory beyond its inputs and weights. The
drafter's head is trainable, the target's frozen. Prints a table and writes nothing.

    python scripts/bench_losses.py     # vocabulary 151,936, 2,048 positions, 7 depths, width 1,024
    python scripts/bench_losses.py --tokens 512 --dtype bfloat16
"""

from __future__ import annotations

import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import psutil
import torch
import typer
from rich.console import Console
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.measuring import in_fresh_process, table, with_peak_memory
from train.losses.objective import chunked_objective, default_chunk_size, plain_objective

VARIANTS = {
    "plain": "plain autograd, every depth's logits held",
    "chunked": "chunked, one call per depth",
    "joint": "chunked, one call over all depths",
}


@dataclass(frozen=True)
class Size:
    """The sizes and settings of a measurement."""

    vocab: int
    tokens: int
    depths: int
    hidden: int
    threads: int
    dtype: str
    device: str
    loss: str
    chunk: int
    repeats: int

    def plain_bytes(self) -> int:
        """Memory of the plain variant: log q and p of every depth, temporary tensors, the head's
        gradients."""
        logits = 4 * self.vocab * self.tokens
        return (2 * self.depths + 5) * logits + 5 * 4 * self.vocab * self.hidden


class Problem:
    """Random states, a trainable draft head and a frozen target head. Depth k matches the positions
    shifted by k."""

    def __init__(self, size: Size) -> None:
        torch.manual_seed(0)
        self.size, device = size, size.device
        self.head = nn.Linear(size.hidden, size.vocab, bias=False, device=device)
        self.target = nn.Linear(size.hidden, size.vocab, bias=False, device=device).requires_grad_(
            False
        )
        self.target_hidden = torch.randn(size.tokens, size.hidden, device=device)
        self.labels = torch.randint(0, size.vocab, (size.tokens,), device=device)
        steps = [torch.arange(size.tokens, device=device).roll(-k) for k in range(size.depths)]
        self.index = torch.cat(steps)  # [depths * tokens]
        self.hidden = torch.randn(
            size.depths * size.tokens, size.hidden, device=device, requires_grad=True
        )
        self.autocast = (
            torch.autocast(device, torch.bfloat16) if size.dtype == "bfloat16" else nullcontext()
        )

    def loss(self, variant: str) -> Tensor:
        """The sum over all depths, with its graph."""
        mix, chunk = {self.size.loss: 1.0}, self.size.chunk or None
        weight = torch.ones(self.index.shape[0], device=self.hidden.device)
        if variant == "joint":
            rows = (self.target_hidden, self.target, weight, self.labels[self.index], mix)
            return chunked_objective(
                self.hidden, self.head, *rows, chunk_size=chunk, target_index=self.index
            )[0]
        total = torch.zeros((), device=self.hidden.device)
        for hidden, index in zip(
            self.hidden.split(self.size.tokens), self.index.split(self.size.tokens), strict=True
        ):
            rows = (
                self.target_hidden[index],
                self.target,
                weight[: len(index)],
                self.labels[index],
                mix,
            )
            if variant == "plain":
                total = total + plain_objective(hidden, self.head, *rows)[0]
            else:
                total = total + chunked_objective(hidden, self.head, *rows, chunk_size=chunk)[0]
        return total

    def run(self, variant: str) -> tuple[float, float, float]:
        """(seconds, CPU seconds, loss) of one forward and backward from empty gradients."""
        self.hidden.grad = self.head.weight.grad = None
        start, cpu = time.perf_counter(), time.process_time()
        with self.autocast:
            loss = self.loss(variant) / self.index.shape[0]
        loss.backward()
        if self.size.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start, time.process_time() - cpu, loss.item()


def measure(variant: str, size: Size) -> tuple[float, float, float, int]:
    """(best seconds, their CPU seconds, loss, peak bytes)."""
    torch.set_num_threads(size.threads)
    Problem(replace(size, vocab=64, tokens=2)).run(variant)  # load the kernels
    problem = Problem(size)
    runs, peak = with_peak_memory(
        lambda: [problem.run(variant) for _ in range(size.repeats)], size.device
    )
    return *min(runs), peak


def main(
    vocab: Annotated[int, typer.Option(help="Vocabulary of drafter and target.")] = 151_936,
    tokens: Annotated[
        int, typer.Option(help="Positions per depth; halved until the plain variant fits.")
    ] = 2048,
    depths: Annotated[int, typer.Option(help="Draft depths of one unroll.")] = 7,
    hidden: Annotated[int, typer.Option(help="Width of both heads' input.")] = 1024,
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 1,
    dtype: Annotated[
        str, typer.Option(help="float32, or bfloat16 for autocast over float32 weights.")
    ] = "float32",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = (
        "cuda" if torch.cuda.is_available() else "cpu"
    ),
    loss: Annotated[str, typer.Option(help="Any divergence on distributions.")] = "forward_kl",
    chunk: Annotated[int, typer.Option(help="Rows per chunk; 0 chooses from the vocabulary.")] = 0,
    repeats: Annotated[int, typer.Option(help="Runs per variant; the best time counts.")] = 1,
    memory_gb: Annotated[
        float, typer.Option(help="Memory to use at most; 0 means 70 % of what is available.")
    ] = 0.0,
) -> None:
    """Compare the memory and time of the chunked objective with plain autograd."""
    if dtype not in ("float32", "bfloat16"):
        raise typer.BadParameter(f"{dtype!r}: expected float32 or bfloat16", param_hint="--dtype")
    size = Size(vocab, tokens, depths, hidden, threads, dtype, device, loss, chunk, repeats)
    free = torch.cuda.mem_get_info()[0] if device == "cuda" else psutil.virtual_memory().available
    while size.plain_bytes() > (memory_gb * 1e9 or 0.7 * free) and size.tokens > 64:
        size = replace(size, tokens=size.tokens // 2)
    rows = chunk or default_chunk_size(vocab, torch.device(device))
    shape = (
        f"{size.tokens} of {tokens} tokens x {depths} depths, vocabulary {vocab:,}, width {hidden}"
    )
    title = f"{loss}, {shape}, {dtype}, {device}, {threads} threads, chunk {rows}"
    shown = table(
        title,
        "variant",
        "time s",
        "CPU s",
        "rows/s",
        "peak GB",
        "time ratio",
        "memory ratio",
        "loss",
    )
    reference: tuple[float, int] | None = None
    for variant, meaning in VARIANTS.items():
        seconds, cpu, value, peak = in_fresh_process(measure, variant, size)
        reference = reference or (seconds, peak)
        ratios = f"{seconds / reference[0]:.2f}", f"{peak / reference[1]:.3f}"
        speed = f"{size.tokens * depths / seconds:,.0f}"
        shown.add_row(
            meaning,
            f"{seconds:.2f}",
            f"{cpu:.2f}",
            speed,
            f"{peak / 1e9:.2f}",
            *ratios,
            f"{value:.5f}",
        )
    Console().print(shown)


if __name__ == "__main__":
    typer.run(main)
