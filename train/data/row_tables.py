"""Packed rows in a table on disk, which all processes map."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, overload

import numpy as np
import pyarrow

from draftsmith.train.data.arrow_tables import mapped_table, save_table
from draftsmith.train.data.list_column import ListColumn
from draftsmith.train.data.loss_mask import TokenRow
from draftsmith.train.data.packing import PackedRow

ROW_FORMAT = 2  # of tables of rows and of prompts
ARRAYS = ("input_ids", "position_ids", "segment_ids", "loss_mask")
ROWS_AT_ONCE = 256  # packed rows that are in memory while a table is written


class PackedRows(Sequence[PackedRow]):
    """The packed rows of a table. Their arrays are views on the mapped file, which cannot be
    written to."""

    def __init__(self, path: Path) -> None:
        table = mapped_table(path)
        self._arrays = {name: ListColumn(table.column(name)) for name in ARRAYS}
        self._workloads = table.column("workloads")

    @overload
    def __getitem__(self, index: int) -> PackedRow: ...

    @overload
    def __getitem__(self, index: slice) -> list[PackedRow]: ...

    def __getitem__(self, index: int | slice) -> PackedRow | list[PackedRow]:
        chosen = range(len(self))[index]
        if isinstance(chosen, range):
            return [self[number] for number in chosen]
        arrays = {name: column[chosen] for name, column in self._arrays.items()}
        arrays["loss_mask"] = arrays["loss_mask"].view(bool)
        return PackedRow(**arrays, workloads=tuple(self._workloads[chosen].as_py()))

    def __len__(self) -> int:
        return len(self._workloads)


def save_rows(path: Path, rows: Iterable[PackedRow], facts: Mapping[str, Any]) -> None:
    """Writes a table of packed rows, which are taken one by one."""
    rows = iter(rows)
    lists = {name: pyarrow.list_(pyarrow.int32()) for name in ARRAYS}
    lists |= {
        "loss_mask": pyarrow.list_(pyarrow.uint8()),
        "workloads": pyarrow.list_(pyarrow.string()),
    }
    schema = pyarrow.schema(lists)

    def batches() -> Iterator[pyarrow.RecordBatch]:
        while members := list(islice(rows, ROWS_AT_ONCE)):
            arrays = [[getattr(row, name) for row in members] for name in ARRAYS]
            arrays[-1] = [mask.view(np.uint8) for mask in arrays[-1]]
            workloads = pyarrow.array([row.workloads for row in members], schema.types[-1])
            columns = [*map(ListColumn.arrow, arrays), workloads]
            yield pyarrow.record_batch(columns, schema=schema)

    save_table(path, schema, batches(), facts)


def rows_address(rows: Iterable[TokenRow], *settings: Any) -> str:
    """The hash of rows that are there, and of `settings`."""
    digest = hashlib.blake2b(json.dumps(settings).encode(), digest_size=12)
    for row in rows:
        digest.update(f"{row.workload}/{len(row)}/".encode())
        digest.update(row.input_ids.tobytes() + row.loss_mask.tobytes())
    return digest.hexdigest()
