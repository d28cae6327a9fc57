"""Features of the next rows on a second stream: what waits for what, and that they are the same."""

from __future__ import annotations

import pytest
import torch

from draftsmith.speculators.target.frozen_target import FrozenTarget
from draftsmith.train.features.row_features import RowFeatures
from draftsmith.train.features.source import InProcess
from tests.support.models import make_tiny_model
from tests.support.training import make_rows


@pytest.fixture
def target(claimed_gpu) -> FrozenTarget:
    return FrozenTarget(make_tiny_model("llama").to("cuda"), [1, 2])


class Watched(InProcess):
    """Which stream computes."""

    def __init__(self, target, streams) -> None:
        super().__init__(target)
        self.streams = streams
        self.computed_on = []

    def of(self, rows, batch):
        self.computed_on.append(self.streams.current_stream())
        return super().of(rows, batch)


def test_features_ahead_wait_for_the_stream_in_use_and_are_waited_for_by_it(claimed_gpu, target):
    streams = claimed_gpu.streams
    main = streams.main
    features = RowFeatures(Watched(target, streams), make_rows())
    log = main.log
    features.compute_ahead([3, 0])
    features.compute_ahead([1, 2])  # one at a time
    (side,) = features.source.computed_on
    assert side is not main
    assert ("wait_stream", side, main) == log[0]
    done = log[-1][2]
    assert log[-1][:2] == ("record_event", side)
    batch = features.batch([3, 0])
    read = [tensor for name, stream, tensor in log if name == "record_stream" and stream is side]
    assert all(any(tensor is read_tensor for read_tensor in read) for tensor in batch.values())
    log.clear()
    taken = features.of([3, 0], batch)
    assert log[0] == ("wait_event", main, done)
    recorded = [tensor for name, stream, tensor in log[1:] if stream is main]
    assert recorded[0] is taken.taps
    assert recorded[1] is taken.last_hidden
    again = features.of([3, 0])
    assert features.source.computed_on == [side, main]
    assert torch.equal(again.taps, taken.taps)
    assert torch.equal(again.last_hidden, taken.last_hidden)


@pytest.mark.parametrize("overlaps", [True, False])
def test_nothing_is_computed_ahead_where_it_is_switched_off_or_the_source_waits(
    claimed_gpu, target, overlaps
):
    source = Watched(target, claimed_gpu.streams)
    source.waits = source.overlaps = False
    source.overlaps = not overlaps
    RowFeatures(source, make_rows(), overlaps=overlaps).compute_ahead([0])
    assert not source.computed_on


def test_rows_kept_in_pinned_memory_are_copied_without_waiting(claimed_gpu, target):
    rows = make_rows()
    on_device = RowFeatures(InProcess(target), rows, keep_bytes=1e9)
    on_host = RowFeatures(InProcess(target), rows, keep_bytes=1e9, on_host=True)
    expected = on_device.of([2, 4])
    on_host.of([2, 4])
    with claimed_gpu.waits() as waits:
        again = on_host.of([4, 2])
    assert not waits, claimed_gpu.sites
    assert on_host.kept_bytes == on_device.kept_bytes
    length = len(rows[2])
    assert torch.equal(again.taps[1, :length], expected.taps[0, :length])
    assert again.last_hidden.is_cuda
