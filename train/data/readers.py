"""Reads rows from files and data sets, each with its place.

JSON and CSV are read here, a line at a time, so that a damaged line is named and harms no other,
and text stays text. Everything else goes through the `datasets` library, whose names of splits are
used throughout."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from draftsmith.speculators.errors import DataError
from draftsmith.train.data.bad_rows import BadRow
from draftsmith.train.recipe.data_sections import Source

PlacedRow = tuple[str, Any]  # its place, and the row or a BadRow
TEXT = (".jsonl", ".json", ".csv")
TABLE = ".parquet"
KINDS = ", ".join((*TEXT, TABLE))
COMPRESSED = (".gz", ".bz2", ".zst")
BOM = b"\xef\xbb\xbf"
SAVED = ("state.json", "dataset_dict.json")  # a folder that `save_to_disk` wrote has one
LONGEST_FIELD = 2**31 - 1  # characters of a field of CSV; the default is 131,072
UNCLOSED = "unexpected end of data"  # what csv says of a quote that is open at the end
SHUFFLED_ROWS = 10_000  # of a stream, among which the next one is drawn


def rows_of(source: Source) -> Iterator[PlacedRow]:
    """The rows of a resolved source, a stream shuffled. DataError: there is nothing to read."""
    if source.path is None or any((Path(source.path) / name).exists() for name in SAVED):
        split = source.split or "train"
        yield from _table_rows(f"{source.label} {split}", lambda: _data_set(source, split))
        return
    path = Path(source.path)
    if not path.exists():
        raise DataError(
            "no such file or directory; a data set of the Hub is a source of a recipe, with `name`"
            " in place of `path`",
            where=f"{path}",
        )
    for part in (source.split or "train").split("+"):
        split = part.partition("[")[0]
        files = _files(path, split)
        rows: Iterable[PlacedRow] = chain.from_iterable(_file_rows(file) for file in files)
        if "[" in part:  # all are counted first
            counted = list(rows)
            rows = (counted[i] for i in _slice(part, len(counted)))
        yield from rows


def kind_of(path: Path) -> str | None:
    """The kind of file by its name, compressed or not; None if it is none that is read here."""
    suffix = Path(path.stem if path.suffix in COMPRESSED else path.name).suffix
    return suffix if suffix in TEXT or path.suffix == TABLE else None


def _files(path: Path, split: str) -> list[Path]:
    """The files of a split. DataError: there are none; it says what is there."""
    splits = _splits(path)
    if split in splits:
        return splits[split]
    if splits:
        raise _no_split(split, splits, path)
    raise DataError(
        f"{'no file' if path.is_file() else 'a folder without a file'} of {KINDS}; save the"
        " conversations as one of these, compressed or not",
        where=f"{path}",
    )


def _no_split(split: str, splits: Iterable[str], path: str | Path) -> DataError:
    return DataError(
        f"nothing is of the split {split!r}, but of {', '.join(sorted(splits))}; give one of these"
        " as `split` of the source in a recipe, or a file by its own path",
        where=f"{path}",
    )


def _splits(path: Path) -> dict[str, list[Path]]:
    """The files that are read here, by the split that file and folder names tell as in the
    `datasets` library; a file by its own path is of the split train."""
    from datasets.data_files import DataFilesDict, get_data_patterns

    if path.is_file():
        return {"train": [path]} if kind_of(path) else {}
    if not any(kind_of(file) for file in path.rglob("*")):
        return {}
    splits = {}
    by_split = DataFilesDict.from_patterns(get_data_patterns(str(path)), base_path=str(path))
    for name, paths in by_split.items():
        files = [path / Path(file).relative_to(path.resolve()) for file in paths]
        if files := sorted(file for file in files if kind_of(file)):
            splits[str(name)] = files
    return splits


def _file_rows(path: Path) -> Iterator[PlacedRow]:
    """The rows of a file. DataError: it cannot be read, or it breaks off (a torn archive), since
    nobody knows how many rows are lost."""
    if path.suffix == TABLE:
        import datasets

        options: dict[str, Any] = {"data_files": str(path), "split": "train", "streaming": True}
        yield from _table_rows(str(path), lambda: datasets.load_dataset("parquet", **options))
        return
    number = 0
    read = {".jsonl": _lines, ".json": _list_or_lines, ".csv": _csv}[kind_of(path) or ""]
    try:
        with _opened(path) as file:
            for number, row in read(file, path):
                place = f"{path}:{number}"
                yield place, BadRow(place, row.what) if isinstance(row, BadRow) else row
    except (OSError, EOFError, ValueError, csv.Error) as error:
        if not number:
            raise DataError(f"cannot be read: {error}", where=f"{path}") from error
        raise DataError(
            f"the file breaks off behind row {number}: {error}; get or write it anew, or save the"
            " rows before as a file of their own",
            where=f"{path}",
        ) from error


def _opened(path: Path) -> io.BufferedReader:
    """The file, decompressed if its name says so."""
    import pyarrow

    return io.BufferedReader(pyarrow.input_stream(str(path), compression="detect"))


def _lines(file: io.BufferedReader, path: Path) -> Iterator[tuple[int, Any]]:
    """A row of JSON per line that is not blank; lines count from 1, as editors do."""
    for number, line in enumerate(file, 1):
        if line := line.removeprefix(BOM if number == 1 else b"").strip():
            try:
                yield number, json.loads(line.decode("utf-8"))
            except (ValueError, RecursionError) as error:  # of decoding as well
                yield number, BadRow("", f"not JSON: {error}")


def _list_or_lines(file: io.BufferedReader, path: Path) -> Iterator[tuple[int, Any]]:
    """A list in one document, whose items count from 1; or lines, often called .json too."""
    if file.peek(4096).removeprefix(BOM).lstrip()[:1] != b"[":
        yield from _lines(file, path)
        return
    try:
        rows = json.loads(file.read().decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"expected a list of rows as JSON: {error}", where=f"{path}") from None
    yield from enumerate(rows, 1)


def _csv(file: io.BufferedReader, path: Path) -> Iterator[tuple[int, Any]]:
    """A row per record, all of its values text; its number is that of its last line. Bytes that are
    no text are left in their row, whose checks name them. csv.Error: a quote is never closed, and
    has taken the rows behind it."""
    csv.field_size_limit(LONGEST_FIELD)
    text = io.TextIOWrapper(file, "utf-8-sig", errors="surrogateescape", newline="")
    number = 0

    def lines() -> Iterator[str]:  # counted, since the reader does not count one that it refuses
        nonlocal number
        for line in text:
            number += 1
            yield line

    reader = csv.DictReader(lines(), strict=True)
    while True:
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            if UNCLOSED in str(error):
                raise
            yield number, BadRow("", f"not CSV: {error}")
            continue
        if more := row.get(None):  # fields without a name
            yield number, BadRow("", f"{len(more)} more fields than names; quote text with commas")
        else:
            yield number, row


def _slice(split: str, count: int) -> range:
    """The rows of a slice such as train[:10%], of `count`."""
    from datasets import ReadInstruction

    try:
        (part,) = ReadInstruction.from_spec(split).to_absolute({split.partition("[")[0]: count})
    except (ValueError, AssertionError) as error:
        raise DataError(f"{error}", where=f"split {split!r}") from None
    return range(part.from_, part.to)


def _table_rows(label: str, load: Any) -> Iterator[PlacedRow]:
    """The rows of a table of the `datasets` library, which raises whatever its back ends raise."""
    number = 0
    try:
        for row in load():
            yield f"{label} #{number}", row
            number += 1
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"cannot be read after {number} rows: {error}", where=label) from error


def _data_set(source: Source, split: str) -> Iterable[Any]:
    """A data set on the hub, or one that was saved."""
    import datasets

    if source.path is None:
        name, revision = source.hub_id
        table = datasets.load_dataset(
            name, source.config, split=split, revision=revision, streaming=source.streaming
        )
        if source.streaming:
            return table.shuffle(seed=0, buffer_size=SHUFFLED_ROWS)
        return table
    return _saved_rows(source.path, split)


def _saved_rows(path: str, split: str) -> Iterator[Any]:
    """The rows of a split that `save_to_disk` wrote; one table alone is its own split, and train.
    DataError: there is no such split; it says what is there."""
    import datasets

    saved = datasets.load_from_disk(path)
    if not isinstance(saved, datasets.DatasetDict):
        saved = {"train": saved, str(saved.split or "train"): saved}
    for part in split.split("+"):
        name = part.partition("[")[0]
        if name not in saved:
            raise _no_split(name, saved, path)
        table = saved[name]
        yield from table.select(_slice(part, len(table))) if "[" in part else table
