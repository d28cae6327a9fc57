"""A column of lists of an Arrow table as arrays: views on memory that may be a mapped file."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow


class ListColumn:
    """`column[i]`: list i as an array that cannot be written to."""

    def __init__(self, column: pyarrow.ChunkedArray) -> None:
        self._chunks = [
            (chunk.offsets.to_numpy(), chunk.values.to_numpy(zero_copy_only=True))
            for chunk in column.chunks
        ]
        self._ends = np.cumsum([len(chunk) for chunk in column.chunks])

    def __getitem__(self, index: int) -> np.ndarray:
        number = int(np.searchsorted(self._ends, index, side="right"))
        before = int(self._ends[number - 1]) if number else 0
        offsets, values = self._chunks[number]
        start = offsets[index - before]
        stop = offsets[index - before + 1]
        return values[start:stop]

    @property
    def lengths(self) -> np.ndarray:
        """Of all lists."""
        parts = [np.diff(offsets) for offsets, _ in self._chunks]
        return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int32)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    @staticmethod
    def arrow(arrays: Sequence[np.ndarray]) -> pyarrow.ListArray:
        """The arrays, of one kind, as such a column."""
        offsets = np.cumsum([0, *map(len, arrays)], dtype=np.int64).astype(np.int32)
        return pyarrow.ListArray.from_arrays(offsets, pyarrow.array(np.concatenate(arrays)))
