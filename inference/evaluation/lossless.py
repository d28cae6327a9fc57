"""Compares greedy outputs with drafting and without, token for token, and judges the first
difference.

In float32 any difference is a failure. In bfloat16 the same position, run at another batch shape,
gives slightly other logits, so two tokens may lie closer than arithmetic can tell: such a tie is
counted apart. A difference is a tie only if the noise that is *measured* there, by re-running that
very position in the engine's own forward, is as large as the gap between the two tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest

import torch
from torch import Tensor

from draftsmith.inference.engine_options import EngineOptions
from draftsmith.inference.model_runner.model_runner import ModelRunner
from draftsmith.inference.outputs import RequestOutput
from draftsmith.inference.report.schema import LosslessCheck, TokenDifference

# logits whose noise is watched: a single one, rounded to bfloat16, often happens not to move
LEADING = 8
MOST_LONGER = 29  # tokens that the other rows of a batch have more
MOST_TOKENS = EngineOptions().max_num_batched_tokens  # of a forward that is no verification


def compare_greedy(
    runner: ModelRunner,
    references: Sequence[RequestOutput],
    outputs: Sequence[RequestOutput],
    *,
    num_speculative_tokens: int,
    rows: int,
) -> LosslessCheck:
    """Outputs with drafting against references without, both greedy, of the same prompts.

    `runner`: of the target that wrote them, in the dtype that it had; the engine's own where it is
    at hand, since its kernels round in their own way. `num_speculative_tokens` and `rows`: the
    batch shapes that the runs used, re-run at a difference."""
    details: list[TokenDifference] = []
    for i, (without, drafted) in enumerate(zip(references, outputs, strict=True)):
        position = first_difference(without.outputs[0].token_ids, drafted.outputs[0].token_ids)
        if position is not None:
            block = num_speculative_tokens + 1
            details.append(_difference(runner, f"{i}", without, drafted, position, block, rows))
    ties = sum(detail.tie for detail in details)
    return LosslessCheck(
        dtype=str(runner.target.dtype).removeprefix("torch."),
        checked_prompts=len(outputs),
        mismatches=len(details) - ties,
        ties=ties,
        details=details,
    )


def first_difference(reference: Sequence[object], output: Sequence[object]) -> int | None:
    """The first index at which the two differ, the end of the shorter one included; None if they
    are equal."""
    return next((i for i, (a, b) in enumerate(zip_longest(reference, output)) if a != b), None)


def _difference(
    runner: ModelRunner,
    prompt: str,
    without: RequestOutput,
    drafted: RequestOutput,
    position: int,
    block: int,
    rows: int,
) -> TokenDifference:
    """The difference of two outputs at `position`, judged. `prompt`: what the report calls it.
    `block`: tokens of a verification."""
    reference = without.outputs[0].token_ids
    output = drafted.outputs[0].token_ids
    expected = reference[position] if position < len(reference) else None
    produced = output[position] if position < len(output) else None
    shapes = _shapes(without.prompt_token_ids, reference[:position], block, rows)
    logits = (_logits_after(runner, *shape) for shape in shapes)
    gap, noise, tie = _judge(logits, expected, produced)
    return TokenDifference(
        prompt=prompt,
        position=position,
        reference_token=expected,
        token=produced,
        top_two_gap=gap,
        noise=noise,
        tie=tie and runner.target.dtype != torch.float32,
    )


def _judge(
    runs: Iterator[Tensor], expected: int | None, produced: int | None
) -> tuple[float, float, bool]:
    """(top-two gap, noise, tie) from the logits [V] of one position at one batch shape after the
    other, until the noise explains the difference.

    Two tokens tie if neither lies further below the top than the gap between two leading logits is
    seen to change."""
    first = next(runs)
    top = first.topk(min(LEADING, len(first)))
    watched = [token for token in (expected, produced) if token is not None]
    leading = sorted({*top.indices.tolist(), *watched})
    behind = float(top.values[0] - first[watched].min()) if len(watched) == 2 else float("inf")
    seen = [first[leading]]
    noise = 0.0
    for logits in runs:
        changes = [logits[leading] - earlier for earlier in seen]
        noise = max([noise, *(float(change.max() - change.min()) for change in changes)])
        seen.append(logits[leading])
        if behind <= noise:
            break
    return float(top.values[0] - top.values[1]), noise, behind <= noise


def _shapes(
    prompt: list[int], output: list[int], block: int, rows: int
) -> Iterator[tuple[list[int], list[int], int, int]]:
    """Arguments of `_logits_after` that give prompt + output at once and in the steps of verifying
    and decoding, alone, in equal rows, and in rows of another length (whose masks take another path
    through the attention kernel). What is longer than MOST_TOKENS in all rows is fed in chunks, as
    the engine feeds prompts."""
    ids = prompt + output
    rows = max(rows, 2)
    longer_by = min(len(prompt), MOST_LONGER)
    at_once = [len(ids)]
    in_blocks = [len(prompt), *_split(len(output), block)]
    if len(output) < block < len(ids):
        in_blocks = [len(ids) - block, block]  # as wide as the run's first verifications
    decoded = [len(prompt), *_split(len(output), 1)]
    for pieces, count, longer in (
        (at_once, 1, 0),
        (in_blocks, 1, 0),
        (at_once, rows, 0),
        (in_blocks, rows, longer_by),
        (decoded, 1, 0),
        (decoded, rows, longer_by),
    ):
        most = max(MOST_TOKENS // count, block)
        chunks = [chunk for piece in pieces for chunk in _split(piece, most)]
        yield ids, chunks, count, longer


def _split(length: int, size: int) -> list[int]:
    """`length` in pieces of `size`, the remainder first: the last piece is a full block, as in the
    run."""
    return ([length % size] if length % size else []) + [size] * (length // size)


@torch.inference_mode()
def _logits_after(
    runner: ModelRunner,
    ids: list[int],
    pieces: Sequence[int],
    rows: int,
    longer_by: int,
) -> Tensor:
    """[V] logits of row 0 after `ids`, fed to `rows` rows in pieces of these lengths. The other
    rows hold the same tokens, after `longer_by` more."""
    scratch = runner.scratch(rows, len(ids) + longer_by)
    tokens = torch.tensor([ids] * rows, device=runner.target.device)  # [rows, length]

    def feed(part: Tensor, first: int) -> Tensor:
        _, last_hidden = scratch(first, part)
        scratch.advance(first, [part.shape[1]] * len(part))
        return last_hidden

    if longer_by:
        feed(tokens[1:, :longer_by], 1)
    start = 0
    for T in pieces:
        last_hidden = feed(tokens[:, start : start + T], 0)
        start += T
    return scratch.logits(last_hidden[:, -1:])[0, -1].float()
