"""Reduced draft vocabularies: which tokens a head can propose, and the maps between ids."""

from __future__ import annotations

import pytest
import torch

from draftsmith.speculators.errors import CheckpointError
from draftsmith.speculators.vocab.draft_vocab import (
    FILE,
    choose_draft_vocabulary,
    coverage,
    from_offsets,
    load_ids,
    save_ids,
    scatter_to_target,
    to_draft_ids,
    to_offsets,
    to_target_ids,
)
from tests.support.errors import raises_at

IDS = torch.tensor([1, 4, 6])  # target ids of the draft ids 0, 1, 2


def test_choose_draft_vocabulary_takes_the_most_frequent_and_the_lower_of_equals():
    counts = torch.tensor([0.0, 5.0, 2.0, 2.0, 9.0])
    assert choose_draft_vocabulary(counts, 3).tolist() == [1, 2, 4]
    assert coverage(counts, torch.tensor([1, 2, 4])) == pytest.approx(16 / 18)


def test_scatter_to_target_of_a_reduced_vocabulary_gives_every_token_its_own_probability():
    q = torch.tensor([[[0.2, 0.5, 0.3]], [[1.0, 0.0, 0.0]]])
    full = scatter_to_target(q, IDS, 8)
    assert full.tolist() == [
        [[0.0, pytest.approx(0.2), 0.0, 0.0, 0.5, 0.0, pytest.approx(0.3), 0.0]],
        [[0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]],
    ]
    assert scatter_to_target(q, None, 3) is q


def test_ids_of_both_vocabularies_map_to_one_another():
    draft_ids = torch.tensor([[2, 0], [1, 1]])
    assert to_target_ids(draft_ids, IDS).tolist() == [[6, 1], [4, 4]]
    assert to_draft_ids(torch.arange(8), IDS).tolist() == [-1, 0, -1, -1, 1, -1, 2, -1]
    # in the order of a head that was published elsewhere
    assert to_draft_ids(torch.arange(8), IDS[[2, 0, 1]]).tolist() == [-1, 1, -1, -1, 2, -1, 0, -1]


def test_offsets_of_a_checkpoint_are_read_back_and_plain_ids_refused():
    assert to_offsets(IDS).tolist() == [1, 3, 4]
    assert torch.equal(from_offsets(to_offsets(IDS), 8, "here"), IDS)
    with raises_at(CheckpointError, "here"):
        from_offsets(IDS, 8, "here")


def test_ids_in_a_folder_are_read_back_or_refused(tmp_path):
    with raises_at(CheckpointError, tmp_path / FILE):
        load_ids(tmp_path, 3, 8)
    save_ids(IDS, tmp_path)
    assert torch.equal(load_ids(tmp_path, 3, 8), IDS)
    for size, vocab_size in ((4, 8), (3, 6)):
        with raises_at(CheckpointError, tmp_path / FILE):
            load_ids(tmp_path, size, vocab_size)
