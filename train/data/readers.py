"""Rows as they lie in files and data sets, each with its place; what cannot be read comes as a BadRow in its turn.

JSON is read a line at a time and strictly, so that a damaged line says where it is and harms no other. Must not know:
what a row means (`train.data.sources`).
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from speculators.errors import DataError
from train.data.bad_rows import BadRow
from train.recipe.data_sections import Source

Row = tuple[str, Any]  # where it is, and the row or a BadRow
LINES, LISTS, TABLES = ".jsonl", ".json", ".parquet"
PACKED = (".gz", ".bz2", ".zst")
BOM = b"\xef\xbb\xbf"


def rows_of(source: Source, *, seed: int = 0) -> Iterator[Row]:
    """The rows of a source with a path or a name, in order. Raises DataError where there is nothing to read."""
    if source.path is None:
        yield from _hub_rows(source, seed)
        return
    path = Path(source.path)
    if not path.exists():
        hint = f"a relative path starts at the working directory, {Path.cwd().name}/"
        if not kind_of(path):
            hint = "for a dataset on the hub write name: instead of path:"
        raise DataError(f"{path}: no such file or directory; {hint}")
    if any((path / name).exists() for name in ("state.json", "dataset_dict.json")):
        yield from _saved_rows(source)
        return
    for part in (source.split or "train").split("+"):
        files = _shards(path, part.partition("[")[0]) if path.is_dir() else [_known(path, part)]
        rows = (row for file in files for row in _file_rows(file))
        yield from _sliced(rows, part) if "[" in part else rows


def kind_of(path: Path) -> str | None:
    """The kind of file by its name, compressed or not; None if it is none that is read here."""
    name = path.stem if path.suffix in PACKED else path.name
    return suffix if (suffix := Path(name).suffix) in (LINES, LISTS, TABLES) else None


def _known(path: Path, split: str) -> Path:
    if kind_of(path) is None:
        raise DataError(f"{path}: expected a .jsonl, .json or .parquet file, or a dataset directory")
    if split.partition("[")[0] != "train":
        raise DataError(f"{path}: split {split!r}: a single file has the split train alone")
    return path


def _shards(folder: Path, split: str) -> list[Path]:
    """The files of a split in a directory, as the `datasets` library tells splits by file and folder names."""
    from datasets.data_files import DataFilesDict, get_data_patterns

    if not any(kind_of(file) for file in folder.rglob("*")):
        raise DataError(f"{folder}: the directory holds no .jsonl, .json or .parquet file")
    found = DataFilesDict.from_patterns(get_data_patterns(str(folder)), base_path=str(folder))
    files = {str(name): [Path(file) for file in some if kind_of(Path(file))] for name, some in found.items()}
    if not files.get(split):
        there = ", ".join(name for name, some in files.items() if some)
        raise DataError(f"{folder}: the directory has no split {split!r}; it has {there}")
    return sorted(folder / file.relative_to(folder.resolve()) for file in files[split])


def _file_rows(path: Path) -> Iterator[Row]:
    """What a file holds; where it breaks off (a torn archive), the last row says so."""
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


def _sliced(rows: Iterator[Row], split: str) -> list[Row]:
    """The rows of a slice such as train[:10%]; all are counted first."""
    from datasets import ReadInstruction

    found = list(rows)
    try:
        (part,) = ReadInstruction.from_spec(split).to_absolute({split.partition("[")[0]: len(found)})
    except (ValueError, AssertionError) as error:
        raise DataError(f"split {split!r}: {error}") from None
    return found[part.from_ : part.to]


# --------------------------------------------------------------------------------------------- JSON


def _opened(path: Path) -> io.BufferedReader:
    """The file, decompressed if its name says so."""
    import pyarrow

    return io.BufferedReader(pyarrow.input_stream(str(path), compression="detect"))


def _lines(path: Path) -> Iterator[Row]:
    """A row per line that is not blank; lines count from 1, as editors do."""
    with _opened(path) as file:
        for number, line in enumerate(file, 1):
            if number == 1:
                line = line.removeprefix(BOM)
            if line.strip():
                place = f"{path}:{number}"
                yield place, _or_bad(place, lambda line=line: decode(line))


def _list(path: Path) -> Iterator[Row]:
    """A list in one document, read item by item; or lines, which are often called .json too."""
    with _opened(path) as file:
        data = file.read().removeprefix(BOM).strip()
    if data.startswith(b"["):
        yield from _items(path, data)
    elif data.startswith(b"{") and (b"\n" not in data or isinstance(_or_bad("", lambda: decode(data)), BadRow)):
        yield from _lines(path)
    else:
        quoted = data[:60].decode("utf-8", "replace")
        raise DataError(f"{path}: expected a list of rows, got {quoted!r}; use .jsonl for a row per line")


def _items(path: Path, data: bytes) -> Iterator[Row]:
    """Every item up to the first that cannot be read, after which no place in the list is sure."""
    torn = "the list is not closed"
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        text, torn = data[: error.start].decode("utf-8"), "what follows is not UTF-8 text"
    position, number = _after(text, 1, " \t\r\n"), 0
    while not text.startswith("]", position):
        place = f"{path}[{number}]"
        if position >= len(text):
            yield _torn(place, torn)
            return
        try:
            row, position = _DECODER.raw_decode(text, position)
        except (ValueError, RecursionError, BadRow) as error:
            bad = error if isinstance(error, BadRow) else _why(error)
            line = text.count("\n", 0, getattr(error, "pos", position)) + 1
            yield _torn(place, f"line {line}: {bad.what}")
            return
        yield place, row
        position, number = _after(text, position, " \t\r\n,"), number + 1
    if text[position + 1 :]:
        yield _torn(f"{path}[{number}]", "text after the end of the list")


def _after(text: str, position: int, skipped: str) -> int:
    while position < len(text) and text[position] in skipped:
        position += 1
    return position


def decode(line: bytes) -> Any:
    """One line as JSON: UTF-8, no NaN, no key twice. Raises BadRow without a place."""
    try:
        return _DECODER.decode(line.decode("utf-8").strip())
    except UnicodeDecodeError as error:
        raise BadRow("", "not_utf8", f"not UTF-8 text (byte {error.start + 1}): {error.reason}") from None
    except (ValueError, RecursionError) as error:
        raise _why(error) from None


def _why(error: Exception) -> BadRow:
    if isinstance(error, RecursionError):
        return BadRow("", "too_deep", "nested too deeply to be read")
    if isinstance(error, json.JSONDecodeError):
        return BadRow("", "not_json", f"not JSON (column {error.colno}): {error.msg}")
    return BadRow("", "not_json", f"not JSON: {error}")


def _or_bad(place: str, read: Callable[[], Any]) -> Any:
    try:
        return read()
    except BadRow as error:
        return error.at(place)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise BadRow("", "duplicate_key", f"the key {twice!r} is given twice, and it is not clear which counts")
    return made


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON value")


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_no_constant)


# --------------------------------------------------------------------------------------------- tables


def _table(path: Path) -> Iterator[Row]:
    """Parquet, a few hundred rows at a time; texts are checked row by row where a batch has one that is not UTF-8."""
    from pyarrow import parquet

    number = 0
    with parquet.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=512):
            for at, row in enumerate(_rows_of_batch(path, batch, number)):
                yield f"{path} #{number + at}", row
            number += batch.num_rows


def _rows_of_batch(path: Path, batch: Any, number: int) -> list[Any]:
    try:
        return batch.to_pylist()
    except UnicodeDecodeError:
        rows: list[Any] = []
        for i in range(batch.num_rows):
            try:
                rows += batch.slice(i, 1).to_pylist()
            except UnicodeDecodeError as error:
                what = f"not UTF-8 text (byte {error.start + 1}): {error.reason}"
                rows.append(BadRow(f"{path} #{number + i}", "not_utf8", what))
        return rows


def _saved_rows(source: Source) -> Iterator[Row]:
    """A directory that `save_to_disk` wrote."""
    import datasets

    def load(split: str) -> Any:
        name, bracket, _ = split.partition("[")
        table = datasets.load_from_disk(source.path)
        table = table[name] if isinstance(table, datasets.DatasetDict) else table
        if not bracket:
            return table
        (part,) = datasets.ReadInstruction.from_spec(split).to_absolute({name: len(table)})
        return table.select(range(part.from_, part.to))

    yield from _numbered(source, load)


def _hub_rows(source: Source, seed: int) -> Iterator[Row]:
    import datasets

    def load(split: str) -> Any:
        table = datasets.load_dataset(
            source.name, source.config, split=split, revision=source.revision, streaming=source.streaming
        )
        return table.shuffle(seed=seed, buffer_size=source.shuffle_buffer) if source.shuffle_buffer else table

    yield from _numbered(source, load)


def _numbered(source: Source, load: Callable[[str], Any]) -> Iterator[Row]:
    """The rows of a table of the `datasets` library, which raises whatever its many back ends raise."""
    split, number = source.split or "train", 0
    try:
        rows = iter(load(split))
    except Exception as error:
        raise DataError(f"{source.label}: split {split!r} cannot be loaded: {error}") from error
    while True:
        try:
            some = list(islice(rows, 1))
        except Exception as error:
            raise DataError(f"{source.label}: split {split!r} breaks off after {number} rows: {error}") from error
        if not some:
            return
        yield f"{source.label} {split} #{number}", some[0]
        number += 1
