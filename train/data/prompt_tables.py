"""The prompts of examples in a table on disk, which all processes map."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, overload

import numpy as np
import pyarrow

from draftsmith.train.data.arrow_tables import mapped_table, save_table
from draftsmith.train.data.list_column import ListColumn

PROMPTS_AT_ONCE = 10_000  # that are in memory while a table is written


class Prompts(Sequence[tuple[int, ...]]):
    """The prompts of a table, read from the mapped file when they are asked for.

    examples   the number of each prompt's example, int32
    chosen     the places in the table of the prompts that are seen, in their order; None: all
    """

    def __init__(self, path: Path, chosen: np.ndarray | None = None) -> None:
        table = mapped_table(path)
        self.path = path
        self._ids = ListColumn(table.column("input_ids"))
        self._chosen = np.arange(len(self._ids)) if chosen is None else chosen
        self.examples = table.column("example").to_numpy()[self._chosen]
        self.lengths = self._ids.lengths[self._chosen]

    def at(self, places: Sequence[int] | np.ndarray) -> Prompts:
        """Those at some places of this sequence."""
        return Prompts(self.path, self._chosen[np.asarray(places, dtype=np.int64)])

    @overload
    def __getitem__(self, index: int) -> tuple[int, ...]: ...

    @overload
    def __getitem__(self, index: slice) -> Prompts: ...

    def __getitem__(self, index: int | slice) -> tuple[int, ...] | Prompts:
        if isinstance(index, slice):
            return self.at(np.arange(len(self))[index])
        return tuple(self._ids[int(self._chosen[index])].tolist())

    def __len__(self) -> int:
        return len(self._chosen)


def save_prompts(path: Path, prompts: Mapping[int, np.ndarray], facts: Mapping[str, Any]) -> None:
    """Writes a table of prompts (int32), by the numbers of their examples."""
    numbers = iter(prompts)
    lists = {"example": pyarrow.int32(), "input_ids": pyarrow.list_(pyarrow.int32())}
    schema = pyarrow.schema(lists)

    def batches() -> Iterator[pyarrow.RecordBatch]:
        while members := list(islice(numbers, PROMPTS_AT_ONCE)):
            ids = ListColumn.arrow([prompts[number] for number in members])
            examples = pyarrow.array(members, pyarrow.int32())
            yield pyarrow.record_batch([examples, ids], schema=schema)

    save_table(path, schema, batches(), facts)
