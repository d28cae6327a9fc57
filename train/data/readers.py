"""Reads rows from files and data sets, each with its place; a row that cannot be read is a BadRow
in its turn.

JSON is read strictly and a line at a time, so that a damaged line is named and harms no other. The
`datasets` library reads the hub and its own folders, and tells splits and slices."""

from __future__ import annotations

import io
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from speculators.errors import DataError
from train.data.bad_rows import BadRow
from train.recipe.data_sections import Source

Row = tuple[str, Any]  # where it is, and the row or a BadRow
LINES, LISTS, TABLES = ".jsonl", ".json", ".parquet"
COMPRESSED = (".gz", ".bz2", ".zst")
BOM = b"\xef\xbb\xbf"


def rows_of(source: Source, *, seed: int = 0) -> Iterator[Row]:
    """The rows of a source with a path or a name, in order. Raises DataError where there is nothing
    to read."""
    path = None if source.path is None else Path(source.path)
    if path is None or any((path / name).exists() for name in ("state.json", "dataset_dict.json")):
        yield from _dataset_rows(source, seed)
        return
    if not path.exists():
        hint = f"a relative path starts at the working directory, {Path.cwd().name}/"
        if not kind_of(path):
            hint = "for a dataset on the hub write name: instead of path:"
        raise DataError(f"{path}: no such file or directory; {hint}")
    for part in (source.split or "train").split("+"):
        files = _shards(path, part.partition("[")[0]) if path.is_dir() else [_known(path, part)]
        rows: Iterable[Row] = (row for file in files for row in _file_rows(file))
        if "[" in part:  # all are counted first
            counted = list(rows)
            rows = (counted[i] for i in _slice(part, len(counted)))
        yield from rows


def kind_of(path: Path) -> str | None:
    """The kind of file by its name, compressed or not; None if it is none that is read here."""
    suffix = Path(path.stem if path.suffix in COMPRESSED else path.name).suffix
    return suffix if suffix in (LINES, LISTS, TABLES) else None


def _known(path: Path, split: str) -> Path:
    if kind_of(path) is None:
        raise DataError(
            f"{path}: expected a .jsonl, .json or .parquet file, or a dataset directory"
        )
    if split.partition("[")[0] != "train":
        raise DataError(f"{path}: split {split!r}: a single file has the split train alone")
    return path


def _shards(folder: Path, split: str) -> list[Path]:
    """The files of a split in a directory, as the `datasets` library tells splits by file and
    folder names."""
    from datasets.data_files import DataFilesDict, get_data_patterns

    if not any(kind_of(file) for file in folder.rglob("*")):
        raise DataError(f"{folder}: the directory holds no .jsonl, .json or .parquet file")
    splits = DataFilesDict.from_patterns(get_data_patterns(str(folder)), base_path=str(folder))
    files = {
        str(name): [Path(file) for file in some if kind_of(Path(file))]
        for name, some in splits.items()
    }
    if not files.get(split):
        there = ", ".join(name for name, some in files.items() if some)
        raise DataError(f"{folder}: the directory has no split {split!r}; it has {there}")
    return sorted(folder / file.relative_to(folder.resolve()) for file in files[split])


def _file_rows(path: Path) -> Iterator[Row]:
    """The rows of a file; where it breaks off (a torn archive), the last row says so."""
    from pyarrow import ArrowException

    number, read = 0, {LINES: _lines, LISTS: _list, TABLES: _table}[kind_of(path) or ""]
    try:
        for row in read(path):
            number += 1
            yield row
    except (OSError, EOFError, ArrowException) as error:
        if not number:
            raise DataError(f"{path}: cannot be read: {error}") from error
        yield _torn(f"{path}, after row {number}", str(error))


def _torn(place: str, why: str) -> Row:
    return place, BadRow(place, "torn_file", f"{why}; nothing after it can be read")


def _slice(split: str, count: int) -> range:
    """The rows of a slice such as train[:10%], of `count`."""
    from datasets import ReadInstruction

    try:
        (part,) = ReadInstruction.from_spec(split).to_absolute({split.partition("[")[0]: count})
    except (ValueError, AssertionError) as error:
        raise DataError(f"split {split!r}: {error}") from None
    return range(part.from_, part.to)


# --------------------------------------------------------------------------------------------- JSON


def _opened(path: Path) -> io.BufferedReader:
    """The file, decompressed if its name says so."""
    import pyarrow

    return io.BufferedReader(pyarrow.input_stream(str(path), compression="detect"))


def _lines(path: Path) -> Iterator[Row]:
    """A row per line that is not blank; lines count from 1, as editors do."""
    with _opened(path) as file:
        for number, line in enumerate(file, 1):
            line = line.removeprefix(BOM) if number == 1 else line
            if line.strip():
                yield f"{path}:{number}", _decoded(line, f"{path}:{number}")


def _list(path: Path) -> Iterator[Row]:
    """A list in one document, read item by item; or lines, which are often called .json too."""
    with _opened(path) as file:
        data = file.read().removeprefix(BOM).strip()
    if data.startswith(b"["):
        yield from _items(path, data)
    elif data.startswith(b"{") and (b"\n" not in data or isinstance(_decoded(data, ""), BadRow)):
        yield from _lines(path)
    else:
        quoted = data[:60].decode("utf-8", "replace")
        raise DataError(
            f"{path}: expected a list of rows, got {quoted!r}; use .jsonl for a row per line"
        )


def _items(path: Path, data: bytes) -> Iterator[Row]:
    """Every item up to the first that cannot be read, after which no place in the list is sure."""
    torn = "the list is not closed"
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        text, torn = data[: error.start].decode("utf-8"), "what follows is not UTF-8 text"
    position, number = _SPACE.match(text, 1).end(), 0
    while not text.startswith("]", position):
        place = f"{path}[{number}]"
        if position >= len(text):
            yield _torn(place, torn)
            return
        try:
            row, position = _DECODER.raw_decode(text, position)
        except (ValueError, RecursionError, BadRow) as error:
            line = text.count("\n", 0, getattr(error, "pos", position)) + 1
            yield _torn(place, f"line {line}: {_why(error, place).what}")
            return
        yield place, row
        position, number = _SEPARATOR.match(text, position).end(), number + 1
    if text[position + 1 :]:
        yield _torn(f"{path}[{number}]", "text after the end of the list")


def _decoded(line: bytes, place: str) -> Any:
    """One line as JSON (UTF-8, no NaN, no key twice), or the BadRow that says why it is none."""
    try:
        return _DECODER.decode(line.decode("utf-8").strip())
    except (ValueError, RecursionError, BadRow) as error:
        return _why(error, place)


def _why(error: Exception, place: str) -> BadRow:
    match error:
        case BadRow():
            return BadRow(place, error.reason, error.what)
        case UnicodeDecodeError():
            return BadRow(
                place, "not_utf8", f"not UTF-8 text (byte {error.start + 1}): {error.reason}"
            )
        case RecursionError():
            return BadRow(place, "too_deep", "nested too deeply to be read")
        case json.JSONDecodeError():
            return BadRow(place, "not_json", f"not JSON (column {error.colno}): {error.msg}")
    return BadRow(place, "not_json", f"not JSON: {error}")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        ((name, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise BadRow(
            "",
            "duplicate_key",
            f"the key {name!r} is given twice, and it is not clear which counts",
        )
    return made


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON value")


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_no_constant)
_SPACE, _SEPARATOR = re.compile(r"[ \t\r\n]*"), re.compile(r"[ \t\r\n,]*")


# ---------------------------------------------------------------------------------------------
# tables


def _table(path: Path) -> Iterator[Row]:
    """Parquet, a few hundred rows at a time; row by row where a batch has text that is not
    UTF-8."""
    from pyarrow import parquet

    number = 0
    with parquet.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=512):
            try:
                rows = batch.to_pylist()
            except UnicodeDecodeError:
                rows = [
                    _table_row(batch.slice(i, 1), f"{path} #{number + i}")
                    for i in range(batch.num_rows)
                ]
            for row in rows:
                yield f"{path} #{number}", row
                number += 1


def _table_row(batch: Any, place: str) -> Any:
    try:
        return batch.to_pylist()[0]
    except UnicodeDecodeError as error:
        return _why(error, place)


def _dataset_rows(source: Source, seed: int) -> Iterator[Row]:
    """The rows of a data set on the hub, or of a directory that `save_to_disk` wrote.

    The library raises whatever its many back ends raise.
    """
    split, number = source.split or "train", 0
    try:
        table = _dataset(source, split, seed)
    except Exception as error:
        raise DataError(f"{source.label}: split {split!r} cannot be loaded: {error}") from error
    try:
        for row in table:
            yield f"{source.label} {split} #{number}", row
            number += 1
    except Exception as error:
        raise DataError(
            f"{source.label}: split {split!r} breaks off after {number} rows: {error}"
        ) from error


def _dataset(source: Source, split: str, seed: int) -> Iterable[Any]:
    import datasets

    if source.path is None:
        table = datasets.load_dataset(
            source.name,
            source.config,
            split=split,
            revision=source.revision,
            streaming=source.streaming,
        )
        return (
            table.shuffle(seed=seed, buffer_size=source.shuffle_buffer)
            if source.shuffle_buffer
            else table
        )
    table = datasets.load_from_disk(source.path)
    table = table[split.partition("[")[0]] if isinstance(table, datasets.DatasetDict) else table
    return table.select(_slice(split, len(table))) if "[" in split else table
