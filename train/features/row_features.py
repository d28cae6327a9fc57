"""The target's features of training rows, by their numbers: once per step, per run, or for many
runs.

The features of a row are the same in every epoch. With memory to spare they are kept, and further
epochs cost the head's own steps only; a source that waits is asked for the rows of the next step
while this one trains, and on CUDA a target in this process computes those of the next micro-step
beside it. Kept rows are computed one by one, so that a step's features depend on its rows alone and
never on which of them were kept already."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from draftsmith.speculators.precision import to_device
from draftsmith.speculators.target.frozen_target import TargetFeatures
from draftsmith.train.data.packing import PackedRow, collate
from draftsmith.train.features.side_stream import Launched, SideStream
from draftsmith.train.features.source import FeatureSource, ReadAhead, RowStates, joined


class RowFeatures:
    """Batches of packed rows and the target's features of them.

    keep_bytes: bytes of features that may stay on the source's device; 0 keeps none
    on_host: they stay in the host's memory instead, pinned where the device is CUDA's
    overlaps: `compute_ahead` computes on a second stream, where the device has streams
    """

    def __init__(
        self,
        source: FeatureSource,
        rows: Sequence[PackedRow],
        *,
        pad_token_id: int = 0,
        keep_bytes: float = 0,
        on_host: bool = False,
        overlaps: bool = True,
    ) -> None:
        self.source = source
        self.rows = rows
        self.pad_token_id = pad_token_id
        self.keep_bytes = keep_bytes
        self.kept_bytes = 0
        self.on_host = on_host
        self.ahead = ReadAhead(source)
        streams = overlaps and source.overlaps and source.device.type == "cuda"
        self._side = SideStream(source.device) if streams else None
        # the micro-step that is computed ahead: its rows, their batch and their features
        self._coming: tuple[list[int], dict[str, Any], Launched[TargetFeatures]] | None = None
        self._kept: dict[int, RowStates] = {}
        self._waited = 0.0

    def batch(self, indices: Sequence[int]) -> dict[str, Any]:
        """input_ids, position_ids, segment_ids, loss_mask [B, T], on the source's device."""
        if self._coming is not None and self._coming[0] == list(indices):
            return self._coming[1]
        batch = collate([self.rows[i] for i in indices], pad_token_id=self.pad_token_id)
        return {name: to_device(tensor, self.source.device) for name, tensor in batch.items()}

    def of(self, indices: Sequence[int], batch: dict[str, Any] | None = None) -> TargetFeatures:
        """The features of the rows; `batch`: their batch, if it was made already."""
        if self._coming is not None and self._coming[0] == list(indices):
            launched = self._coming[2]
            self._coming = None
            return launched.take(_states)
        return self._compute(indices, batch or self.batch(indices))

    def _compute(self, indices: Sequence[int], batch: dict[str, Any]) -> TargetFeatures:
        if not self.keep_bytes and not self.source.waits:
            return self.source.of([self.rows[i] for i in indices], batch)
        return joined([self._row(i) for i in indices], batch)

    def compute_ahead(self, indices: Sequence[int]) -> None:
        """Computes the features of a micro-step beside what is launched next, unless those of one
        are waiting to be taken. On a device without streams, and of a source that waits: nothing.
        """
        if self._side is None or self._coming is not None:
            return
        batch = self.batch(indices)
        launched = self._side.launch(lambda: self._compute(indices, batch), batch.values())
        self._coming = list(indices), batch, launched

    def forget_ahead(self) -> None:
        """Forgets what was begun and not taken."""
        self._coming = None
        self.ahead.close()

    def begin(self, indices: Sequence[int]) -> None:
        """Begins to read rows that will be asked for, if that takes waiting."""
        if not self.source.waits:
            return
        for index in indices:
            if index not in self._kept:
                self.ahead.begin(index, self.rows[index])

    def close(self) -> None:
        """Ends the reading ahead, and closes the source."""
        self.forget_ahead()
        self.source.close()

    def take_waited(self) -> float:
        """The seconds that `of` has waited for its source since the last call."""
        waited = self._waited
        self._waited = 0.0
        return waited

    def _row(self, index: int) -> RowStates:
        if index in self._kept:
            return self._on_device(self._kept[index])
        began = time.perf_counter()
        fetched = self.ahead.take(index, self.rows[index])
        if self.source.waits:
            self._waited += time.perf_counter() - began
        row = self.source.states(self.rows[index], fetched)
        size = sum(t.numel() * t.element_size() for t in row if t is not None)
        if self.kept_bytes + size <= self.keep_bytes:
            self._kept[index] = _on_host(row) if self.on_host else row
            self.kept_bytes += size
        return row

    def _on_device(self, row: RowStates) -> RowStates:
        taps, last_hidden = row
        device = self.source.device
        if taps is not None:
            taps = taps.to(device, non_blocking=True)
        return taps, last_hidden.to(device, non_blocking=True)


def _states(features: TargetFeatures) -> Iterator[Tensor]:
    if features.taps is not None:
        yield features.taps
    yield features.last_hidden


def _on_host(row: RowStates) -> RowStates:
    """A copy in the host's memory, without waiting for a device."""
    taps, last_hidden = row
    return None if taps is None else _to_host(taps), _to_host(last_hidden)


def _to_host(states: Tensor) -> Tensor:
    if states.device.type == "cpu":
        return states
    pinned = states.device.type == "cuda"
    copied = torch.empty(states.shape, dtype=states.dtype, pin_memory=pinned)
    return copied.copy_(states, non_blocking=pinned)
