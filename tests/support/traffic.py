"""Logs of traffic, as a server's log writes them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from draftsmith.inference.traffic_log.records import (
    LoggedCounters,
    LoggedExchange,
    LogHeader,
    to_line,
)


def write_log(folder: Path, exchanges: Sequence[LoggedExchange]) -> Path:
    """A log of one file, which holds all of them."""
    folder.mkdir(parents=True, exist_ok=True)
    header = LogHeader(kind="exchanges", start=0, seconds=1 << 40)
    (folder / "0.jsonl").write_bytes(b"".join(map(to_line, [header, *exchanges])))
    return folder


def write_counters(folder: Path, counters: Sequence[LoggedCounters]) -> None:
    """The counters of a server, in a log that is there."""
    header = LogHeader(kind="counters", start=0, seconds=1 << 40)
    (folder / "counters.jsonl").write_bytes(b"".join(map(to_line, [header, *counters])))
