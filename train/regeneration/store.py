"""Responses on disk, by content. A kill tears no response, and no two processes write into one
file.

The name of a store is a hash of everything that its responses depend on beside their prompts. Its
files are the shards `<name>.0000.jsonl` …, a response per line, written when it has ended; one
process locks each."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, groupby
from pathlib import Path
from typing import IO, Any

from inference.whole_file import write_whole
from speculators.errors import DataError
from train.data.loss_mask import TokenRow, Turn, fewest_rows

SHARD_BYTES = 256 << 20  # then a new shard begins
SYNC_EVERY_S = 1.0  # a power failure may lose the responses of so many seconds; a kill loses none


@dataclass(frozen=True)
class Response:
    """One prompt and its response, as tokens. `example`: the number of its conversation."""

    workload: str
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    temperature: float
    example: int = 0

    def row(self) -> TokenRow:
        return TokenRow.from_response(self.prompt_ids, self.output_ids, self.workload)


def rows_of(responses: Iterable[Response]) -> Iterator[TokenRow]:
    """Token rows of responses in the order of their conversations. Turns that continue one
    another's tokens are one row; other turns are rows of their own."""
    for _, group in groupby(responses, key=lambda response: response.example):
        turns = list(group)
        rows = [turn.row() for turn in turns]
        if len(rows) > 1:
            rows = fewest_rows(
                [Turn(row.input_ids.tolist(), row.loss_mask) for row in rows], turns[0].workload
            )
        yield from rows


class ResponseStore:
    """Stored responses: reads all files of the name, and appends to this process's own.

    known      token ids by key
    given_up   reasons by key, of responses that a run was allowed to go without
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        self.known: dict[str, list[int]] = {}
        self.given_up: dict[str, str] = {}
        self._shard: _Shard | None = None
        for path in self.shards():
            self._read(_whole_lines(path.read_bytes()).decode().splitlines(), path)

    def shards(self) -> list[Path]:
        pattern = re.compile(rf"{re.escape(self.name)}\.\d{{4}}\.jsonl")
        return sorted(
            path for path in self.folder.glob(f"{self.name}*.jsonl") if pattern.fullmatch(path.name)
        )

    def add(self, key: str, token_ids: Sequence[int]) -> None:
        """Stores one response in this process's shard. ValueError if it is there already."""
        if key in self.known:
            raise ValueError(f"{self.folder / self.name}: the response {key} is there already")
        self.known[key] = list(token_ids)
        self._line({"key": key, "token_ids": list(token_ids)})

    def give_up(self, reasons: Mapping[str, str]) -> None:
        """Stores responses that will not be asked for again, so that a continued run sees the same
        rows."""
        for key, reason in reasons.items():
            if self.given_up.get(key) != reason:
                self.given_up[key] = reason
                self._line({"key": key, "given_up": reason})

    def close(self) -> None:
        if self._shard is not None:
            self._shard.close()
            self._shard = None

    def _line(self, entry: Mapping[str, Any]) -> None:
        if self._shard is None or self._shard.full:
            self.close()
            self._shard = _Shard.free(self.folder, self.name)
        self._shard.write(json.dumps(entry))

    def _read(self, lines: Iterable[str], path: Path) -> None:
        for number, line in enumerate(lines, 1):
            try:
                entry = json.loads(line)
                key, reason = entry["key"], entry.get("given_up")
                ids = None if reason is not None else entry["token_ids"]
            except (ValueError, KeyError, TypeError, AttributeError):
                raise DataError(
                    f"{path}:{number}: no response: {line[:80]!r}; remove the line, and it is"
                    " written again"
                ) from None
            if ids is None:
                self.given_up[key] = reason
            else:
                self.known.setdefault(key, ids)


class _Shard:
    """A locked file, to which this process appends."""

    def __init__(self, path: Path, file: IO[bytes]) -> None:
        self.path, self._file, self._synced = path, file, time.monotonic()

    @classmethod
    def free(cls, folder: Path, name: str) -> _Shard:
        """Opens the first shard that is not locked and not full. A line torn by a kill is cut
        off."""
        folder.mkdir(parents=True, exist_ok=True)
        for number in count():
            path = folder / f"{name}.{number:04d}.jsonl"
            file = path.open("ab+")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.close()
                continue
            shard = cls(path, file)
            if shard.full:
                shard.close()
                continue
            file.seek(0)
            whole = _whole_lines(file.read())
            file.truncate(len(whole))
            return shard
        raise AssertionError

    @property
    def full(self) -> bool:
        return os.fstat(self._file.fileno()).st_size >= SHARD_BYTES

    def write(self, line: str) -> None:
        self._file.write(line.encode() + b"\n")
        self._file.flush()
        if time.monotonic() - self._synced > SYNC_EVERY_S:
            os.fsync(self._file.fileno())
            self._synced = time.monotonic()

    def close(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()  # releases the lock


def _whole_lines(content: bytes) -> bytes:
    return content[: content.rfind(b"\n") + 1]


def part_suffix(part: tuple[int, int]) -> str:
    """The suffix of file names that belong to one of several parts."""
    return f".{part[0]}-of-{part[1]}" if part[1] > 1 else ""


def digest(tree: Any, length: int) -> str:
    """The first `length` hex digits of the sha256 of a value as JSON."""
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()[:length]


def write_json(path: Path, tree: Any) -> None:
    """The file is complete, or as it was."""
    write_whole(path, json.dumps(tree, indent=2, ensure_ascii=False) + "\n")
