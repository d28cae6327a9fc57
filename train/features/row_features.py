"""The target's features of training rows, by their numbers: once per step, per run, or for many
runs.

The features of a row are the same in every epoch. With memory to spare they are kept, and further
epochs cost the head's own steps only; a source that waits is asked for the rows of the next step
while this one trains. Kept rows are computed one by one, so that a step's features depend on its
rows alone and never on which of them were kept already."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from draftsmith.speculators.precision import to_device
from draftsmith.speculators.target.frozen_target import TargetFeatures
from draftsmith.train.data.packing import PackedRow, collate
from draftsmith.train.features.source import FeatureSource, ReadAhead, RowStates, joined


class RowFeatures:
    """Batches of packed rows and the target's features of them.

    keep_bytes: bytes of features that may stay on the source's device; 0 keeps none.
    """

    def __init__(
        self,
        source: FeatureSource,
        rows: Sequence[PackedRow],
        *,
        pad_token_id: int = 0,
        keep_bytes: float = 0,
    ) -> None:
        self.source = source
        self.rows = rows
        self.pad_token_id = pad_token_id
        self.keep_bytes = keep_bytes
        self.kept_bytes = 0
        self.ahead = ReadAhead(source)
        self._kept: dict[int, RowStates] = {}
        self._waited = 0.0

    def batch(self, indices: Sequence[int]) -> dict[str, Any]:
        """input_ids, position_ids, segment_ids, loss_mask [B, T], on the source's device."""
        batch = collate([self.rows[i] for i in indices], pad_token_id=self.pad_token_id)
        return {name: to_device(tensor, self.source.device) for name, tensor in batch.items()}

    def of(self, indices: Sequence[int], batch: dict[str, Any] | None = None) -> TargetFeatures:
        """The features of the rows; `batch`: their batch, if it was made already."""
        batch = batch or self.batch(indices)
        if not self.keep_bytes and not self.source.waits:
            return self.source.of([self.rows[i] for i in indices], batch)
        return joined([self._row(i) for i in indices], batch)

    def begin(self, indices: Sequence[int]) -> None:
        """Begins to read rows that will be asked for, if that takes waiting."""
        if not self.source.waits:
            return
        for index in indices:
            if index not in self._kept:
                self.ahead.begin(index, self.rows[index])

    def close(self) -> None:
        """Ends the reading ahead, and closes the source."""
        self.ahead.close()
        self.source.close()

    def take_waited(self) -> float:
        """The seconds that `of` has waited for its source since the last call."""
        waited = self._waited
        self._waited = 0.0
        return waited

    def _row(self, index: int) -> RowStates:
        if index in self._kept:
            return self._kept[index]
        began = time.perf_counter()
        fetched = self.ahead.take(index, self.rows[index])
        if self.source.waits:
            self._waited += time.perf_counter() - began
        row = self.source.states(self.rows[index], fetched)
        size = sum(t.numel() * t.element_size() for t in row if t is not None)
        if self.kept_bytes + size <= self.keep_bytes:
            self._kept[index] = row
            self.kept_bytes += size
        return row
