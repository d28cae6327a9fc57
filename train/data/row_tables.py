"""Tokens of a run on disk: packed rows and prompts, which all processes of a machine map.

    rows/<address>.arrow   an Arrow table, mapped and never copied
    rows/<address>.json    what was left out and counted, and the checksum of the table

The address is the hash of everything that the tokens depend on, so what is there is never written
again. The table appears whole, and its JSON after it: a table without one, or with another
checksum, is not read."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, overload

import numpy as np
import pyarrow

from draftsmith.inference.whole_file import write_whole
from draftsmith.speculators.export import disk_errors
from draftsmith.train.data.list_column import ListColumn
from draftsmith.train.data.loss_mask import TokenRow
from draftsmith.train.data.packing import PackedRow
from draftsmith.train.data.tokenising import SCRATCH

ROW_FORMAT = 1
ARRAYS = ("input_ids", "position_ids", "segment_ids", "loss_mask")
ROWS_AT_ONCE = 256  # packed rows that are in memory while a table is written
PROMPTS_AT_ONCE = 10_000
ABANDONED_S = 24 * 3600  # after which the files of a killed writer are removed


class PackedRows(Sequence[PackedRow]):
    """The packed rows of a table. Their arrays are views on the mapped file, which cannot be
    written to."""

    def __init__(self, path: Path) -> None:
        table = _mapped(path)
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


class Prompts(Sequence[tuple[int, ...]]):
    """The prompts of a table, read from the mapped file when they are asked for.

    examples   the number of each prompt's example, int32
    chosen     the places in the table of the prompts that are seen, in their order; None: all
    """

    def __init__(self, path: Path, chosen: np.ndarray | None = None) -> None:
        table = _mapped(path)
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

    _save(path, schema, batches(), facts)


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

    _save(path, schema, batches(), facts)


def rows_address(rows: Iterable[TokenRow], *settings: Any) -> str:
    """The hash of rows that are there, and of `settings`."""
    digest = hashlib.blake2b(json.dumps(settings).encode(), digest_size=12)
    for row in rows:
        digest.update(f"{row.workload}/{len(row)}/".encode())
        digest.update(row.input_ids.tobytes() + row.loss_mask.tobytes())
    return digest.hexdigest()


def facts_of(path: Path) -> dict[str, Any] | None:
    """What was saved with the table; None if it is not there, not whole, or damaged."""
    with suppress(OSError, ValueError, KeyError):
        facts = json.loads(_beside(path).read_text(encoding="utf-8"))
        if facts.pop("checksum") == _checksum(path):
            return facts
    return None


def remove_abandoned(folder: Path) -> None:
    """Removes what a killed writer has left in `folder`."""
    for path in folder.glob(f".*{SCRATCH}"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime < ABANDONED_S:
                continue
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()


def _save(
    path: Path,
    schema: pyarrow.Schema,
    batches: Iterable[pyarrow.RecordBatch],
    facts: Mapping[str, Any],
) -> None:
    """The table, and then its facts. OSError names the table."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{uuid.uuid4().hex}{SCRATCH}")
    try:
        with disk_errors(path):
            with (
                pyarrow.OSFile(str(scratch), "wb") as file,
                pyarrow.ipc.new_file(file, schema) as writer,
            ):
                for batch in batches:
                    writer.write_batch(batch)
            checksum = _checksum(scratch)
            os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)
    write_whole(_beside(path), json.dumps({**facts, "checksum": checksum}) + "\n")


def _mapped(path: Path) -> pyarrow.Table:
    return pyarrow.ipc.open_file(pyarrow.memory_map(str(path))).read_all()


def _beside(path: Path) -> Path:
    return path.with_suffix(".json")


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()
