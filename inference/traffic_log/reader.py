"""Reads a log: what its files hold together, in the order of time.

    for exchange in read_log(folder, since=time.time() - 86400): ...

A file ends in half a line if its writer was killed within it: that one line is left out, and every
other that cannot be read is an error. A log may be read while it is written."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple, TypeVar

from draftsmith.inference.traffic_log.records import (
    LoggedCounters,
    LoggedExchange,
    LogHeader,
    from_line,
)
from draftsmith.speculators.errors import DataError

SUFFIX = ".jsonl"

Timed = TypeVar("Timed", LoggedExchange, LoggedCounters)


def read_log(
    folder: Path,
    since: float | None = None,
    until: float | None = None,
    torn: list[Path] | None = None,
) -> Iterator[LoggedExchange]:
    """The exchanges that a log keeps of since <= time < until (seconds since 1970), in the order of
    time. The files of at most two slices or so are held at once.

    torn    is given the file of every half line that is left out

    DataError for a folder without a log, and for a line that cannot be read, by file and line."""
    return _read(LoggedExchange, "exchanges", folder, since, until, torn)


def read_counters(
    folder: Path, since: float | None = None, until: float | None = None
) -> Iterator[LoggedCounters]:
    """What a server's counters grew by, as `read_log`; none where the log has no counters."""
    return _read(LoggedCounters, "counters", folder, since, until, None)


class _File(NamedTuple):
    path: Path
    header: LogHeader


def _read(
    record: type[Timed],
    kind: str,
    folder: Path,
    since: float | None,
    until: float | None,
    torn: list[Path] | None,
) -> Iterator[Timed]:
    by_slice: dict[tuple[int, int], list[_File]] = defaultdict(list)
    for file in _files(folder, torn):
        if file.header.kind == kind:
            by_slice[file.header.start, file.header.seconds].append(file)
    first = float("-inf") if since is None else since
    last = float("inf") if until is None else until
    waiting: list[Timed] = []  # of slices that may reach into the next one
    for (start, seconds), files in sorted(by_slice.items()):
        if start >= last or start + seconds <= first:
            continue
        yield from _in_order(one for one in waiting if one.time < start)
        waiting = [one for one in waiting if one.time >= start]
        kept = _sample(record, files, torn)
        waiting += [one for one in kept if first <= one.time < last]
    yield from _in_order(waiting)


def _in_order(records: Iterator[Timed] | list[Timed]) -> list[Timed]:
    return sorted(records, key=attrgetter("time"))


def _sample(record: type[Timed], files: list[_File], torn: list[Path] | None) -> list[Timed]:
    """What is kept of a slice. The smallest keys of all of its files are among the smallest of
    each, so that several writers have one sample."""
    records = [one for file in files for one in _records(record, file, torn)]
    limits = [file.header.most for file in files if file.header.most is not None]
    if not limits:
        return records
    return heapq.nsmallest(min(limits), records, key=attrgetter("key"))


def _files(folder: Path, torn: list[Path] | None) -> Iterator[_File]:
    """The files of a log, in which at least a header is whole."""
    paths = sorted(folder.glob(f"*{SUFFIX}"))
    if not paths:
        raise DataError(
            f"there is no log (files *{SUFFIX}); give the folder of --log", where=f"{folder}"
        )
    for path in paths:
        try:
            with open(path, "rb") as file:
                line = file.readline()
        except FileNotFoundError:  # the writer removes old ones meanwhile
            continue
        if line.endswith(b"\n"):
            yield _File(path, from_line(LogHeader, line, f"{path}:1"))
        elif torn is not None:
            torn.append(path)


def _records(record: type[Timed], file: _File, torn: list[Path] | None) -> Iterator[Timed]:
    """The records of a file, in its order; none if it has gone since, as old ones do."""
    try:
        lines = open(file.path, "rb")  # noqa: SIM115 (closed below)
    except FileNotFoundError:
        return
    with lines:
        next(lines)  # the header
        for number, line in enumerate(lines, 2):
            if line.endswith(b"\n"):
                yield from_line(record, line, f"{file.path}:{number}")
            elif torn is not None:
                torn.append(file.path)
