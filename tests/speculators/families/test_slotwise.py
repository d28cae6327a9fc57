"""Heads without attention: a slot is worked on exactly as long as a term of it is to come, in
training and drafting."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from inference.kv_cache.ragged_cache import RaggedCache
from speculators.config import DrafterConfig
from speculators.drafter import DraftInput, valid_terms
from speculators.families.attention_free import SlotwiseDrafter

WIDTH, VOCAB, DEPTHS = 6, 11, 3


class Independent(SlotwiseDrafter):
    """A projection of the target's state per depth, as Medusa's."""

    def __init__(self) -> None:
        sizes = dict(hidden_size=WIDTH, target_hidden_size=WIDTH, num_target_layers=1)
        super().__init__(
            DrafterConfig(family="toy", vocab_size=VOCAB, draft_vocab_size=VOCAB, **sizes)
        )
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTHS))
        self.heads = nn.ModuleList(nn.Linear(WIDTH, VOCAB) for _ in range(DEPTHS))
        self.asked: list[int] = []  # slots of each depth

    def advance(self, state, token_ids, depth):
        self.asked.append(len(token_ids))
        return state

    def read(self, state, depth):
        return self.blocks[depth](state)

    def head(self, hidden, depth=0):
        return self.heads[depth](hidden)


class Recurrent(Independent):
    """The state is what all tokens so far add up to."""

    def advance(self, state, token_ids, depth):
        return super().advance(state, token_ids, depth) + token_ids[:, None]


@pytest.fixture
def features():
    """Two rows: documents of 9 and 4 tokens with a prompt between two responses; one of 7,
    padded."""
    torch.manual_seed(3)
    segments = torch.tensor([[0] * 9 + [1] * 4, [0] * 7 + [-1] * 6])
    mask = segments >= 0
    mask[0, 5:7] = False  # a user's turn between two responses
    mask[1, :4] = False
    return SimpleNamespace(
        input_ids=torch.randint(0, VOCAB, segments.shape),
        segment_ids=segments,
        loss_mask=mask,
        last_hidden=torch.randn(*segments.shape, WIDTH),
    )


@pytest.mark.parametrize("kind", [Independent, Recurrent])
def test_every_term_once_and_no_slot_without_a_term_to_come(features, kind) -> None:
    drafter = kind()
    steps = list(drafter.unroll(features, DEPTHS))
    ids, states = features.input_ids.flatten(), features.last_hidden.flatten(0, 1)
    valid = torch.stack([valid_terms(features, depth + 2).flatten() for depth in range(DEPTHS)])
    assert not torch.equal(
        valid[1] | valid[0], valid[0]
    )  # a later depth has terms where depth 0 has none
    for step in steps:
        anchors = valid[step.depth].nonzero().flatten()
        assert torch.equal(step.anchor_index, anchors) and torch.equal(
            step.target_index, anchors + step.depth + 1
        )
        state = states[anchors]
        if kind is Recurrent:
            state = state + sum(ids[anchors + 1 + d] for d in range(step.depth + 1))[:, None]
        torch.testing.assert_close(step.hidden, drafter.blocks[step.depth](state))
    assert drafter.asked == [int(valid[depth:].any(0).sum()) for depth in range(DEPTHS)]
    assert drafter.count_terms(features, DEPTHS).tolist() == valid.sum(1).tolist()


def test_a_batch_without_terms_yields_empty_depths(features) -> None:
    features.loss_mask[:] = False
    assert [len(step.hidden) for step in Recurrent().unroll(features, DEPTHS)] == [0] * DEPTHS


@torch.no_grad()
@pytest.mark.parametrize("kind", [Independent, Recurrent])
def test_drafting_moves_the_lengths_by_the_true_slots_only(features, kind) -> None:
    drafter, cache = kind(), RaggedCache(3, max_len=6, initial_capacity=1)
    ids, states, counts = features.input_ids[:, 1:5], features.last_hidden[:, :4], [4, 2]

    def best(logits):
        return logits.argmax(-1)

    drafter.append(DraftInput(cache, 1, 3, ids[:, :1], None, states[:, :1], [1, 1]))
    drafted = drafter.draft(DraftInput(cache, 1, 3, ids, None, states, counts), DEPTHS, best)
    assert cache.lengths == [0, 5, 3] and cache.bytes() == 0
    for row, count in enumerate(counts):
        state, token = states[row, count - 1 : count], ids[row, count - 1 : count]
        for depth in range(DEPTHS):
            state = drafter.advance(state, token, depth)
            token = best(drafter.head(drafter.read(state, depth), depth))
            assert drafted[row, depth] == token
