"""Every family on rows with branches: training replays what was drafted where verification rejected
it."""

from __future__ import annotations

import pytest
import torch

from speculators.drafter import Drafter
from speculators.target.frozen_target import FrozenTarget
from tests.speculators.families.test_contract import draft_logits
from train.data.packing import collate
from train.on_policy.branches import rollout_rows
from train.on_policy.rollout import Rollout, Round

DEPTHS = 4
World = tuple[FrozenTarget, Drafter]


def rollout(seed: int, prompt: int, accepted: list[int], drafted: int) -> Rollout:
    """A random text in rounds that kept these numbers of random drafts."""
    source = torch.Generator().manual_seed(seed)
    length = prompt + 1 + sum(accepted) + len(accepted)
    text = torch.randint(3, 100, (length,), generator=source).tolist()
    rounds, at = [], prompt + 1
    for n in accepted:
        wrong = torch.randint(3, 100, (drafted - n,), generator=source).tolist()
        if wrong and wrong[0] == text[at + n]:
            wrong[0] = (wrong[0] + 1) % 100
        rounds.append(Round(at, (*text[at : at + n], *wrong), n))
        at += n + 1
    return Rollout(tuple(text[:prompt]), tuple(text[prompt:]), tuple(rounds))


@pytest.mark.slow
@torch.no_grad()
def test_unroll_replays_what_was_drafted(case, world: World) -> None:
    """The q of a rejected round is the one the runtime drafts with when it takes the logged drafts,
    at every depth of the round; so is the target's state that each depth must match. Other slots
    follow the text."""
    target, drafter = world
    depths = min(DEPTHS, drafter.max_depth or DEPTHS)
    texts = [rollout(1, 4, [0, 2, depths, 1, 0], depths), rollout(2, 3, [1, 0, 0], depths)]
    (row,) = rollout_rows(texts, depths=depths, max_length=64)
    features = target.features(**collate([row], length=len(row) + 2))
    steps = list(drafter.unroll(features, depths))
    assert drafter.count_terms(features, depths).tolist() == [len(step.hidden) for step in steps]
    logits = [drafter.head(step.hidden, step.depth) for step in steps]
    drafter.freeze()
    rejected, start = 0, 0
    for text in sorted(texts, key=lambda each: -len(each.output_ids)):  # as they are packed
        ids = torch.tensor([*text.prompt_ids, *text.output_ids])
        forks = {
            each.length - 2: each for each in text.rounds if each.accepted < len(each.drafts) - 1
        }
        for slot in range(len(text.prompt_ids) - 1, len(ids) - 2):
            here = forks.get(slot)
            read = list(here.drafts) if here else ids[slot + 2 :].tolist()
            terms = min(depths, len(here.drafts) if here else len(ids) - slot - 2)
            forced = torch.tensor(read + [0] * depths)
            q = draft_logits(world, ids, slot, depths, forced)
            for step in steps:
                where = (step.anchor_index == start + slot).nonzero().flatten()
                assert len(where) == (step.depth < terms)
                if not len(where):
                    continue
                expected = logits[step.depth][where][0].softmax(-1)
                torch.testing.assert_close(
                    q[step.depth].softmax(-1), expected, atol=1e-5, rtol=1e-4
                )
                _, last = target(torch.cat([ids[: slot + 2], forced[: step.depth]])[None])
                matched = features.last_hidden[0, step.target_index[where][0]]
                torch.testing.assert_close(matched, last[0, -1], atol=1e-4, rtol=1e-4)
                rejected += here is not None and step.depth > here.accepted
        start = next((i for i in range(start, len(row)) if row.segment_ids[i] == 1), len(row))
    assert rejected == sum(
        max(depths - 1 - n, 0) for text in texts for n in (r.accepted for r in text.rounds)
    )


@torch.no_grad()
def test_a_snapshot_drafts_alike_and_shares_the_target(world: World) -> None:
    """It is a copy: training the original does not change it, and the original goes on as it
    was."""
    target, drafter = world
    drafter.train()
    snapshot = drafter.snapshot(torch.float32)
    assert snapshot.target is target and not snapshot.training and drafter.training
    assert not any(p.requires_grad for p in snapshot.parameters())
    assert any(p.requires_grad for p in drafter.parameters())
    ids = torch.randint(3, 100, (9,), generator=torch.Generator().manual_seed(4))
    forced = torch.tensor([5, 6, 7])
    drafted = draft_logits(world, ids, 5, 3, forced)
    torch.testing.assert_close(
        draft_logits((target, snapshot), ids, 5, 3, forced), drafted, atol=1e-5, rtol=1e-4
    )
    for parameter in drafter.trainable_parameters():
        parameter.zero_()
    torch.testing.assert_close(
        draft_logits((target, snapshot), ids, 5, 3, forced), drafted, atol=1e-5, rtol=1e-4
    )
    assert {p.dtype for p in drafter.snapshot(torch.bfloat16).parameters()} == {torch.bfloat16}
