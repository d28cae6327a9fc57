"""What every drafter owes, as assertions: one maths, rows that do not meet; and its Trainer."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch.nn.utils.rnn import pad_sequence

from draftsmith.inference.kv_cache.ragged_cache import RaggedCache
from draftsmith.speculators.drafter import Drafter, DraftInput, DraftLogits
from draftsmith.speculators.target.frozen_target import TargetFeatures
from draftsmith.speculators.vocab.draft_vocab import to_target_ids
from draftsmith.train.features.row_features import RowFeatures
from draftsmith.train.features.source import InProcess
from draftsmith.train.trainer.trainer import Trainer
from tests.support.cases import Case, World, make
from tests.support.tokenizers import spell
from tests.support.training import recipe_of

DEPTHS = 3


def packed(*rows: list[int], vocab: int = 100) -> dict[str, torch.Tensor]:
    """Packed rows of documents of these lengths, with padding behind, as `features` takes them."""
    shape = (len(rows), max(map(sum, rows)) + 3)
    ids = torch.randint(3, vocab, shape, generator=torch.Generator().manual_seed(2))
    positions = torch.zeros_like(ids)
    segments = torch.full_like(ids, -1)
    for row, lengths in enumerate(rows):
        for number, (start, length) in enumerate(zip(itertools.accumulate([0, *lengths]), lengths)):
            positions[row, start : start + length] = torch.arange(length)
            segments[row, start : start + length] = number
    return {
        "input_ids": ids,
        "position_ids": positions,
        "segment_ids": segments,
        "loss_mask": segments >= 0,
    }


@torch.no_grad()
def draft_input(world: World, texts: list[torch.Tensor]) -> DraftInput:
    """Texts as rows of an empty cache, nothing of them read yet."""
    target, drafter = world
    counts = [len(text) - drafter.traits.first_token for text in texts]
    ids = pad_sequence(texts, batch_first=True)
    taps, last = target(ids[:, : max(counts)])
    return DraftInput(
        RaggedCache(len(texts), 64),
        0,
        len(texts),
        ids[:, drafter.traits.first_token :],
        taps if drafter.traits.reads_taps else None,
        last if drafter.traits.reads_last_hidden else None,
        counts,
    )


def part(inputs: DraftInput, start: int, stop: int) -> DraftInput:
    """Some slots of a single row."""
    names = ("token_ids", "taps", "last_hidden")
    tensors = {name: tensor for name in names if (tensor := getattr(inputs, name)) is not None}
    cut = {name: tensor[:, start:stop] for name, tensor in tensors.items()}
    return replace(inputs, counts=[stop - start], **cut)


@torch.no_grad()
def drafted(
    world: World,
    ids: torch.Tensor,
    anchor: int,
    k: int,
    forced: torch.Tensor,
    split: int | None = None,
) -> list[DraftLogits]:
    """What the runtime gives for `k` drafts from slot `anchor`, where `forced` are drafted. The
    first `split` slots are appended before the others; None: half of them."""
    drafter = world[1]
    text = ids[: anchor + 2]  # up to the token after the anchor's
    inputs = draft_input(world, [text])
    (slots,) = inputs.counts
    split = anchor // 2 if split is None else split
    if split:  # two calls: an append, then append and draft
        drafter.append(part(inputs, 0, split))
    with closing(drafter.draft_steps(part(inputs, split, slots), k)) as steps:
        results = [steps.send(None), *(steps.send(token[None]) for token in forced[: k - 1])]
    if (spelt := getattr(drafter, "token_map", None)) is not None:
        slots = len(spelt.opening_ids) + len(spell(spelt, text[:slots].tolist()))
    assert inputs.cache.lengths[0] == slots  # speculative slots are rolled back
    return results


def draft_logits(*asked: Any) -> torch.Tensor:
    """The logits [k, V_draft] of `drafted`."""
    return torch.stack([result.logits[0] for result in drafted(*asked)])


@torch.no_grad()
def all_logits(
    drafter: Drafter, features: TargetFeatures, depths: int = DEPTHS
) -> list[torch.Tensor]:
    return [drafter.head(step.hidden, step.depth) for step in drafter.unroll(features, depths)]


def assert_unroll_equals_draft(
    world: World, batch: dict[str, torch.Tensor], known: Any = None
) -> None:
    """`known`: bool [V], what the drafter can draft; None: all. Others are passed over."""
    target, drafter = world
    features = target.features(**batch)
    with torch.no_grad():
        steps = list(drafter.unroll(features, DEPTHS))
    logits = all_logits(drafter, features)
    counts = drafter.count_terms(features, DEPTHS)
    assert counts.tolist() == [len(step.hidden) for step in steps]
    drafter.freeze()  # as the runtime drafts
    assert [s.depth for s in steps] == list(range(DEPTHS))
    offset = compared = 0
    for length in torch.bincount(batch["segment_ids"][batch["segment_ids"] >= 0]).tolist():
        ids = batch["input_ids"][0, offset : offset + length]
        for anchor in range(length - 2):
            forced = torch.cat([ids[anchor + 2 :], torch.zeros(DEPTHS, dtype=torch.long)])
            if known is not None:
                forced = torch.where(known[forced], forced, int(known.nonzero()[0]))
            results = drafted(world, ids, anchor, DEPTHS, forced)
            for step, draft in zip(steps, results, strict=True):
                where = (step.anchor_index == offset + anchor).nonzero().flatten()
                # a term exists where its token does
                assert len(where) == (anchor + step.depth + 2 < length)
                # the drafts this one stands behind
                before = ids[anchor + 2 : anchor + 2 + step.depth]
                if len(where) and torch.equal(before, forced[: len(before)]):
                    expected = logits[step.depth][where].softmax(-1)
                    torch.testing.assert_close(
                        draft.logits.softmax(-1), expected, atol=1e-5, rtol=1e-4
                    )
                    sure = drafter.confidence(step.hidden[where])
                    torch.testing.assert_close(draft.confidence, sure, atol=1e-4, rtol=1e-4)
                    assert step.target_index[where] == offset + anchor + step.depth + 1
                    compared += step.depth > 0
        offset += length
    assert compared > 5


def random_rows(*lengths: int) -> list[torch.Tensor]:
    """Token ids of texts of these lengths."""
    sources = [torch.Generator().manual_seed(n) for n in lengths]
    return [torch.randint(3, 100, (n,), generator=g) for n, g in zip(lengths, sources)]


def assert_ragged_rows_draft_as_alone(world: World, rows: list[torch.Tensor]) -> None:
    drafter = world[1].freeze()
    greedy = lambda logits: to_target_ids(logits.argmax(-1), drafter.draft_to_target)
    together = drafter.draft(draft_input(world, rows), DEPTHS, greedy)
    for drafts, row in zip(together, rows, strict=True):
        assert torch.equal(drafts, drafter.draft(draft_input(world, [row]), DEPTHS, greedy)[0])


def trainer_of(
    case: Case, model: Any, folder: Path, rows: Sequence[Any], **sections: Any
) -> Trainer:
    """The Trainer of a new drafter of the case, which starts as its recipe says."""
    target, drafter = make(case, model, noise=0.0)
    sections["training"] = {"mixed_precision": "no", **sections["training"]}
    sections["drafter"] = {"unroll_steps": DEPTHS, **case.options}
    recipe = recipe_of(case.family, **sections)
    torch.manual_seed(0)
    drafter.initialise_from(target, recipe.drafter)
    process = {"accelerator": Accelerator(cpu=True), "folder": folder, "fingerprint": "a"}
    return Trainer(recipe, target, drafter, RowFeatures(InProcess(target), rows), **process)
