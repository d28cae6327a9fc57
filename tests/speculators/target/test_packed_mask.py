"""Branches: what the target says of a token of a branch is what it says of the text up to it with
the branch behind."""

from __future__ import annotations

import pytest
import torch

from speculators.target.frozen_target import FrozenTarget
from speculators.target.packed_attention import packed_mask

TEXTS = (9, 14)  # tokens of the two documents of the first row
BRANCHES = ((2, 3), (7, 1), (8, 4))  # (fork within its document, tokens) of each branch of either


@pytest.fixture
def row() -> dict[str, torch.Tensor]:
    """[2, T]: two documents with branches after each, forks at other places in the second; one
    document, padded."""
    source, ids, positions, segments, forks = torch.Generator().manual_seed(5), [], [], [], []
    for segment, length in enumerate(TEXTS):
        start = len(positions)
        positions += range(length)
        segments += [segment] * length
        forks += [-1] * length
        for fork, count in BRANCHES:
            at = min(fork + 3 * segment, length - 1)
            positions += range(at + 1, at + 1 + count)
            segments += [-1] * count
            forks += [start + at] * count
    T = len(positions)
    ids = torch.randint(3, 101, (2, T), generator=source)
    second = torch.arange(T)
    short = T - 5
    return {
        "input_ids": ids,
        "position_ids": torch.stack([torch.tensor(positions), second * (second < short)]),
        "segment_ids": torch.stack([torch.tensor(segments), torch.where(second < short, 0, -1)]),
        "forks": torch.stack([torch.tensor(forks), torch.full((T,), -1)]),
    }


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "qwen3", "qwen3_sliding", "gemma2"])
def test_states_of_a_branch_are_those_of_its_text_with_the_branch_behind(
    tiny_model, row, architecture
) -> None:
    target = FrozenTarget(tiny_model(architecture), (1, 3))
    features = target.features(**row, loss_mask=row["segment_ids"] >= 0)
    ids, forks, segments = row["input_ids"][0], row["forks"][0], row["segment_ids"][0]
    compared = 0
    for slot in range(len(ids)):
        fork = int(forks[slot])
        end = slot if fork < 0 else fork
        text = [i for i in range(end + 1) if segments[i] == segments[end]]
        text += [i for i in range(slot + 1) if fork >= 0 and forks[i] == fork]
        taps, last = target(ids[None, text])
        torch.testing.assert_close(features.last_hidden[0, slot], last[0, -1], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(features.taps[0, slot], taps[0, -1], atol=1e-4, rtol=1e-4)
        compared += fork >= 0
    assert compared == 2 * sum(count for _, count in BRANCHES)
    _, last = target(row["input_ids"][1:, :-5])
    torch.testing.assert_close(features.last_hidden[1, :-5], last[0], atol=1e-4, rtol=1e-4)


def test_without_branches_a_row_has_the_mask_it_has_with_none_named() -> None:
    segments = torch.tensor([[0, 0, 0, 1, 1, -1, -1], [0, 0, 0, 0, 0, 0, 0]])
    plain, named = packed_mask(segments), packed_mask(segments, torch.full_like(segments, -1))
    assert plain is not None and named is not None and torch.equal(plain, named)
    assert packed_mask(segments[1:]) is None
