"""What every drafter owes, as assertions: training and drafting are the same maths, rows do not
meet, sampled text is the target's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator

from draftsmith.inference.kv_cache.ragged_cache import RaggedCache
from draftsmith.speculators.drafter import Drafter, DraftInput
from draftsmith.speculators.target.frozen_target import FrozenTarget, TargetFeatures
from draftsmith.speculators.vocab.draft_vocab import to_target_ids
from draftsmith.train.data.loss_mask import TokenRow
from draftsmith.train.data.packing import pack
from draftsmith.train.trainer.trainer import Trainer
from tests.support.recipes import recipe_of
from tests.support.tokenizers import spell

DEPTHS = 3


World = tuple[FrozenTarget, Drafter]


def packed(lengths: list[int], vocab: int = 100) -> dict[str, torch.Tensor]:
    """One packed row of documents of these lengths, and a padded tail."""
    source = torch.Generator().manual_seed(2)
    ids = torch.randint(3, vocab, (sum(lengths) + 3,), generator=source)
    positions = torch.cat([torch.arange(n) for n in (*lengths, 3)])
    segments = torch.cat(
        [torch.full((n,), i) for i, n in enumerate(lengths)] + [torch.full((3,), -1)]
    )
    return {
        "input_ids": ids[None],
        "position_ids": positions[None],
        "segment_ids": segments[None],
        "loss_mask": (segments >= 0)[None],
    }


def read(
    drafter: Drafter, taps: torch.Tensor | None, last: torch.Tensor
) -> tuple[torch.Tensor | None, ...]:
    return taps if drafter.reads_taps else None, last if drafter.reads_last_hidden else None


@torch.no_grad()
def draft_logits(
    world: World, ids: torch.Tensor, anchor: int, k: int, forced: torch.Tensor
) -> torch.Tensor:
    """Draft logits [k, V_draft] of the runtime path for slot `anchor` of one document, forcing the
    drafted tokens."""
    target, drafter = world
    taps, last = target(ids[None, : anchor + 1])
    cache, seen, first = RaggedCache(1, 64), [], drafter.first_token
    slots = anchor + 2 - first  # up to the token after the anchor's

    def sample(logits):
        seen.append(logits[0])
        return forced[len(seen) - 1][None]

    split = anchor // 2  # two calls: an append, then append and draft
    for part, depth in ((slice(0, split), 0), (slice(split, slots), k)):
        count = part.stop - part.start
        if count:
            features = read(drafter, None if taps is None else taps[:, part], last[:, part])
            next_ids = ids[None, part.start + first : part.stop + first]
            inputs = DraftInput(cache, 0, 1, next_ids, *features, [count])
            drafter.draft(inputs, depth, sample) if depth else drafter.append(inputs)
    if (spelt := getattr(drafter, "token_map", None)) is not None:
        slots = len(spelt.opening_ids) + len(spell(spelt, ids[:slots].tolist()))
    assert cache.lengths[0] == slots  # speculative slots are rolled back
    return torch.stack(seen)


@torch.no_grad()
def all_logits(
    drafter: Drafter, features: TargetFeatures, depths: int = DEPTHS
) -> list[torch.Tensor]:
    return [drafter.head(step.hidden, step.depth) for step in drafter.unroll(features, depths)]


def assert_unroll_equals_draft(
    world: World, batch: dict[str, torch.Tensor], drafted: Any = None
) -> None:
    """`drafted`: bool [V], the tokens that the drafter can draft; None: all. Terms behind others
    are passed over."""
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
            if drafted is not None:
                forced = torch.where(drafted[forced], forced, int(drafted.nonzero()[0]))
            got = draft_logits(world, ids, anchor, DEPTHS, forced)
            for step in steps:
                where = (step.anchor_index == offset + anchor).nonzero().flatten()
                # a term exists where its token does
                assert len(where) == (anchor + step.depth + 2 < length)
                # the drafts this one stands behind
                before = ids[anchor + 2 : anchor + 2 + step.depth]
                if len(where) and torch.equal(before, forced[: len(before)]):
                    expected = logits[step.depth][where][0].softmax(-1)
                    torch.testing.assert_close(
                        got[step.depth].softmax(-1), expected, atol=1e-5, rtol=1e-4
                    )
                    assert step.target_index[where] == offset + anchor + step.depth + 1
                    compared += step.depth > 0
        offset += length
    assert compared > 5


def random_rows(*lengths: int) -> list[torch.Tensor]:
    """Token ids of texts of these lengths."""
    sources = [torch.Generator().manual_seed(n) for n in lengths]
    return [torch.randint(3, 100, (n,), generator=g) for n, g in zip(lengths, sources)]


@torch.no_grad()
def assert_ragged_rows_draft_as_alone(world: World, rows: list[torch.Tensor]) -> None:
    target, drafter = world
    lengths = [len(row) for row in rows]
    drafter.freeze()

    def greedy(logits):
        return to_target_ids(logits.argmax(-1), drafter.draft_to_target)

    def run(chosen: list[int]) -> torch.Tensor:
        cache, first = RaggedCache(len(chosen), 64), drafter.first_token
        width = max(lengths[i] for i in chosen) - first
        ids = torch.zeros(len(chosen), width, dtype=torch.long)
        taps = torch.zeros(len(chosen), width, len(target.tap_layers) * target.hidden_size)
        last = torch.zeros(len(chosen), width, target.hidden_size)
        for j, i in enumerate(chosen):
            n = lengths[i] - first
            seen, last[j, :n] = (None if f is None else f[0] for f in target(rows[i][None, :n]))
            ids[j, :n] = rows[i][first:]
            if seen is not None:
                taps[j, :n] = seen
        counts = [lengths[i] - first for i in chosen]
        inputs = DraftInput(cache, 0, len(chosen), ids, *read(drafter, taps, last), counts)
        return drafter.draft(inputs, DEPTHS, greedy)

    together = run(list(range(len(rows))))
    for i in range(len(rows)):
        assert torch.equal(together[i], run([i])[0])


def rows(count: int = 16, vocab: int = 100) -> list[Any]:
    rng = np.random.default_rng(0)
    token_rows = []
    for _ in range(count):
        ids = rng.integers(3, vocab, int(rng.integers(8, 24)))
        ids[1:] = (ids[:-1] * 7 + 3) % vocab  # something to learn
        token_rows.append(TokenRow(ids, np.arange(len(ids)) >= 3))
    return pack(token_rows, 48)


def trainer(make, case, model: Any, folder: Path, steps: int = 4, **sections: Any) -> Trainer:
    target, drafter = make(case, model, noise=0.0)
    training = {"steps": steps, "batch_size": 2, "learning_rate": 1e-2, "save_every": 2}
    training["mixed_precision"] = "no"
    data = {"train": [{"path": "chats.jsonl"}], "max_length": 48}
    drafting = {"unroll_steps": 4, **case.options}
    recipe = recipe_of(case.family, data=data, drafter=drafting, training=training, **sections)
    torch.manual_seed(0)
    drafter.initialise_from(target, recipe.drafter)
    own = {"accelerator": Accelerator(cpu=True), "folder": folder, "fingerprint": "a"}
    return Trainer(recipe, target, drafter, rows(), **own)
