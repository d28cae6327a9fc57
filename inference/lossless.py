"""Is greedy output with drafting the output without? Token for token, and what to make of the first difference.

In float32 any difference is a failure. In bfloat16 the same position, run at another batch shape, gives slightly other
logits, so two tokens may lie closer than arithmetic can tell: such a tie is counted apart. A difference is a tie only
if the noise that is *measured* there, by re-running that very position, is as large as what separates the two tokens.
This module must not know how the outputs were made, nor any drafter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from inference.cache import RaggedCache
from inference.report_cell import LosslessCheck, TokenDifference
from speculators.errors import DataError
from speculators.target import FrozenTarget

Tokens = Sequence[int]


def compare_greedy(
    target: FrozenTarget, prompts: Sequence[Tokens], references: Sequence[Tokens], outputs: Sequence[Tokens], *,
    num_speculative_tokens: int, rows: int, names: Sequence[str] | None = None,
) -> LosslessCheck:
    """Outputs with drafting against references without, both greedy and from `target` in its present dtype.

    `num_speculative_tokens` and `rows`: the batch shapes that the runs used, re-run at a difference. `names` of the
    prompts default to their places.
    """
    if not len(prompts) == len(references) == len(outputs):
        raise DataError(f"lossless: {len(prompts)} prompts, {len(references)} references and {len(outputs)} outputs")
    dtype = str(target.dtype).removeprefix("torch.")
    details = []
    for i, (prompt, reference, output) in enumerate(zip(prompts, references, outputs, strict=True)):
        place = first_difference(reference, output)
        if place is not None:
            name = str(i) if names is None else names[i]
            shapes = (num_speculative_tokens + 1, rows)
            details.append(_judge(target, name, prompt, reference, output, place, shapes, may_tie=dtype != "float32"))
    ties = sum(detail.tie for detail in details)
    return LosslessCheck(
        dtype=dtype, reference="autoregressive", checked_prompts=len(prompts), mismatches=len(details) - ties, ties=ties,
        details=details,
    )  # fmt: skip


def first_difference(reference: Tokens, output: Tokens) -> int | None:
    """The first index at which the two differ, the end of the shorter one included; None if they are equal."""
    for i, (a, b) in enumerate(zip(reference, output, strict=False)):
        if a != b:
            return i
    return None if len(reference) == len(output) else min(len(reference), len(output))


def _judge(
    target: FrozenTarget, name: str, prompt: Tokens, reference: Tokens, output: Tokens, place: int, shapes: tuple[int, int],
    may_tie: bool,
) -> TokenDifference:
    """Teacher-forces the common prefix at several batch shapes until the noise explains the difference, or all are done."""
    expected = reference[place] if place < len(reference) else None
    found = output[place] if place < len(output) else None
    base: Tensor | None = None
    low = high = gap = noise = None
    tie = False
    for logits in _logits_at_shapes(target, list(prompt), list(reference[:place]), *shapes):
        if base is None:
            top = logits.topk(2)
            base, gap = logits, float(top.values[0] - top.values[1])
            watched = sorted({*top.indices.tolist()} | {t for t in (expected, found) if t is not None})
            low = high = logits[watched]
        low, high = torch.minimum(low, logits[watched]), torch.maximum(high, logits[watched])
        noise = float((high - low).max())
        if expected is not None and found is not None:
            below_top = float(base.max() - base[[expected, found]].min())
            tie = may_tie and below_top <= noise
        if tie:
            break
    return TokenDifference(
        prompt=name, position=place, reference_token=expected, token=found, top_two_gap=gap, noise=noise, tie=tie
    )


def _logits_at_shapes(target: FrozenTarget, prompt: list[int], output: list[int], block: int, rows: int) -> Iterator[Tensor]:
    """Logits [V] float32 after prompt + output: at once and in the steps of decoding and verifying, alone and in rows."""
    at_once = [len(prompt) + len(output)]
    in_blocks = [len(prompt), *_split(len(output), block)]
    yield _logits_after(target, prompt + output, at_once, 1)
    yield _logits_after(target, prompt + output, in_blocks, 1)
    yield _logits_after(target, prompt + output, at_once, max(rows, 2))
    yield _logits_after(target, prompt + output, in_blocks, max(rows, 2))
    yield _logits_after(target, prompt + output, [len(prompt), *_split(len(output), 1)], 1)


def _split(length: int, size: int) -> list[int]:
    """`length` in pieces of `size`, the remainder first: the last piece is a full block, as in the run."""
    return ([length % size] if length % size else []) + [size] * (length // size)


@torch.inference_mode()
def _logits_after(target: FrozenTarget, ids: list[int], pieces: Sequence[int], rows: int) -> Tensor:
    """[V] logits of row 0 after `ids`, fed to `rows` equal rows in pieces of these lengths."""
    cache = RaggedCache(rows, len(ids), device=target.device)
    tokens = torch.tensor([ids] * rows, device=target.device)
    start = 0
    for T in pieces:
        positions, mask = cache.position_ids(0, rows, T), cache.mask(0, rows, T)
        _, last_hidden = target(tokens[:, start : start + T], positions, mask, cache.view(0, rows, T))
        start += T
        for row in range(rows):
            cache.advance(row, T)
    return target.logits(last_hidden[:, -1:])[0, -1].float()
