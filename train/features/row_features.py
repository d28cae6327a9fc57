"""The frozen target's features of training rows: once per step, per run, or for many runs.

The features of a row are the same in every epoch. With memory to spare they are kept, and further
epochs cost the head's own steps only; a cache on disk has them from earlier runs. Kept rows are
computed one by one, so that a step's features depend on its rows alone and never on which of them
were kept already."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from draftsmith.speculators.precision import to_device
from draftsmith.speculators.target.frozen_target import FrozenTarget, TargetFeatures
from draftsmith.train.data.packing import PackedRow, collate
from draftsmith.train.features.cache import FeatureCache


class RowFeatures:
    """Batches of packed rows and the target's features of them.

    keep_bytes: bytes of features that may stay on the target's device; 0 keeps none.
    cache: holds the features of all rows; None: the target computes them.
    """

    def __init__(
        self,
        target: FrozenTarget,
        rows: Sequence[PackedRow],
        *,
        pad_token_id: int = 0,
        keep_bytes: float = 0,
        cache: FeatureCache | None = None,
    ) -> None:
        self.target, self.rows, self.pad_token_id, self.cache = target, rows, pad_token_id, cache
        self.keep_bytes, self.kept_bytes = keep_bytes, 0
        self._kept: dict[
            int, tuple[Tensor | None, Tensor]
        ] = {}  # row -> taps [L, n·H], last_hidden [L, H]

    def batch(self, indices: Sequence[int]) -> dict[str, Any]:
        """input_ids, position_ids, segment_ids, loss_mask [B, T], on the target's device."""
        batch = collate([self.rows[i] for i in indices], pad_token_id=self.pad_token_id)
        return {name: to_device(tensor, self.target.device) for name, tensor in batch.items()}

    def of(self, indices: Sequence[int], batch: dict[str, Any] | None = None) -> TargetFeatures:
        """The features of the rows; `batch`: their batch, if it was made already."""
        batch = batch or self.batch(indices)
        if not self.keep_bytes and self.cache is None:
            return self.target.features(**batch)
        T, rows = batch["input_ids"].shape[1], [self._row(i) for i in indices]
        taps = [taps for taps, _ in rows if taps is not None]
        return TargetFeatures(
            **batch,
            taps=_padded(taps, T) if taps else None,
            last_hidden=_padded([last for _, last in rows], T),
        )

    def _row(self, index: int) -> tuple[Tensor | None, Tensor]:
        if index in self._kept:
            return self._kept[index]
        row = (
            self.made(index)
            if self.cache is None
            else self.cache.row(self.rows[index], self.target.device)
        )
        size = sum(t.numel() * t.element_size() for t in row if t is not None)
        if self.kept_bytes + size <= self.keep_bytes:
            self._kept[index] = row
            self.kept_bytes += size
        return row

    def made(self, index: int) -> tuple[Tensor | None, Tensor]:
        """Computes one row: taps [L, n·H], last_hidden [L, H]."""
        features = self.target.features(**self.batch([index]))
        return None if features.taps is None else features.taps[0], features.last_hidden[0]


def _padded(rows: list[Tensor], length: int) -> Tensor:
    """[L_i, D] -> [B, length, D], padded with zeros."""
    out = rows[0].new_zeros(len(rows), length, rows[0].shape[1])
    for padded, row in zip(out, rows):
        padded[: len(row)] = row
    return out
