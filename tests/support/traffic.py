"""Logs of traffic, as a server's log writes them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from draftsmith.inference.traffic_log.records import LoggedExchange, LogHeader, to_line


def write_log(folder: Path, exchanges: Sequence[LoggedExchange]) -> Path:
    """A log of one file, which holds all of them."""
    folder.mkdir(parents=True, exist_ok=True)
    header = LogHeader(kind="exchanges", start=0, seconds=1 << 40)
    (folder / "0.jsonl").write_bytes(b"".join(map(to_line, [header, *exchanges])))
    return folder
