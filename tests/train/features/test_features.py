"""Kept features: the same for a row whatever batch it is in and whether it was known already."""

from __future__ import annotations

import pytest
import torch

from draftsmith.speculators.target.frozen_target import FrozenTarget
from draftsmith.train.features.row_features import RowFeatures
from draftsmith.train.features.source import InProcess
from tests.support.training import make_rows


@pytest.fixture
def target(tiny_model):
    return FrozenTarget(tiny_model("llama"), [1, 2])


def test_kept_features_are_those_of_a_forward(target):
    rows = make_rows()
    fresh, kept = (
        RowFeatures(InProcess(target), rows),
        RowFeatures(InProcess(target), rows, keep_bytes=1e9),
    )
    indices = [3, 0, 5]
    expected, again = fresh.of(indices), kept.of(indices)
    text = expected.segment_ids >= 0
    for name in ("taps", "last_hidden"):
        torch.testing.assert_close(
            getattr(again, name)[text], getattr(expected, name)[text], atol=1e-5, rtol=1e-4
        )
    for name in ("input_ids", "position_ids", "segment_ids", "loss_mask"):
        assert torch.equal(getattr(again, name), getattr(expected, name))


def test_a_row_is_the_same_to_the_bit_in_any_batch_known_or_not(target):
    rows = make_rows()
    kept, forgetful = (
        RowFeatures(InProcess(target), rows, keep_bytes=1e9),
        RowFeatures(InProcess(target), rows, keep_bytes=1),
    )
    once, again, never_kept = kept.of([2, 4]), kept.of([4, 1, 2]), forgetful.of([2])
    length = len(rows[2])
    assert torch.equal(once.taps[0, :length], again.taps[2, :length])
    assert torch.equal(once.taps[0, :length], never_kept.taps[0, :length])


def test_the_target_is_asked_once_per_row_and_no_more_is_kept_than_allowed(target, monkeypatch):
    rows, asked = make_rows(), []
    plain = target.features
    monkeypatch.setattr(target, "features", lambda **batch: asked.append(1) or plain(**batch))
    size = len(rows[0]) * (2 + 1) * 32 * 4
    features = RowFeatures(InProcess(target), rows, keep_bytes=size)
    for _ in range(3):
        features.of([0])
    assert len(asked) == 1 and features.kept_bytes == size
    for _ in range(2):
        features.of([1])  # no room left
    assert len(asked) == 3 and features.kept_bytes == size
