"""Writes a log: files that only grow, a line a record, within limits of bytes and days.

Of every slice of time a sample is kept: the exchanges with the smallest keys, each drawn at random.
So an exchange is written if its key is smaller than the largest that is kept, and replaces that one
for the reader; a writer that is killed and started again needs to remember nothing, and the samples
of several writers are one. Of n exchanges about most · (1 + ln(n / most)) are written."""

from __future__ import annotations

import errno
import heapq
import os
import re
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from uuid import uuid4

from draftsmith.inference.traffic_log.log_options import LogOptions
from draftsmith.inference.traffic_log.reader import SUFFIX
from draftsmith.inference.traffic_log.records import (
    LoggedCounters,
    LoggedExchange,
    LogHeader,
    to_line,
)
from draftsmith.speculators.errors import ConfigError

PRIVATE_FOLDER = 0o700
PRIVATE_FILE = 0o600
DAY_S = 86400
LATE_S = 3600  # after the end of its slice an exchange may still be written among its sample
NAME = re.compile(rf"(?:exchanges|counters)-(\d{{8}}T\d{{6}}Z)-(\d+)s-[0-9a-f]{{8}}\{SUFFIX}")
STAMP = "%Y%m%dT%H%M%SZ"


class LogWriter:
    """The files of one writer; the folder may have several. One thread may write, and others may
    ask `wants`. ConfigError if the folder cannot be had, or not be written."""

    def __init__(self, folder: Path, options: LogOptions) -> None:
        self.folder = folder
        self._seconds = options.log_slice_s
        self._most = options.log_samples
        self._max_bytes = options.log_max_bytes
        self._max_age_s = options.log_max_days * DAY_S
        self._name = uuid4().hex[:8]  # in the names of this writer's files
        self._keys: dict[int, list[float]] = {}  # kept ones by start of slice, negated: a heap
        self._bytes = 0  # of the log, at least
        try:
            folder.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
            if not os.access(folder, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, "no new files are allowed in it")
            self.remove_old()
        except OSError as error:
            reason = error.strerror or f"{error}"
            raise ConfigError(
                f"cannot be used ({reason}); give a folder that may be written", where=f"{folder}"
            ) from None

    def wants(self, arrival: float, key: float) -> bool:
        """False for an exchange that would be none of its slice's sample."""
        kept = self._keys.get(self._start(arrival), [])
        return len(kept) < self._most or key < -kept[0]

    def write(self, record: LoggedExchange | LoggedCounters) -> bool:
        """Appends a record; False for an exchange that is none of the sample. OSError if it cannot
        be written, or would be more than the log may hold: nothing of it is left then."""
        start = self._start(record.time)
        if isinstance(record, LoggedCounters):
            self._append(LogHeader("counters", start, self._seconds), record)
            return True
        if not self.wants(record.time, record.key):
            return False
        self._append(LogHeader("exchanges", start, self._seconds, self._most), record)
        kept = self._keys.setdefault(start, [])
        heapq.heappush(kept, -record.key)
        if len(kept) > self._most:
            heapq.heappop(kept)
        return True

    def remove_old(self, needed: int = 0) -> None:
        """Removes files of slices that ended too many days ago. If `needed` bytes more are too many
        for the log, also the oldest ones, until a tenth of it is free, and at last those of a clock
        that was ahead: but none of this slice. Files of other names are not touched."""
        now = time.time()
        for start in list(self._keys):
            if start + self._seconds + LATE_S < now:
                del self._keys[start]
        files = []  # with the begin and end of their slices
        for path in self.folder.iterdir():
            named = NAME.fullmatch(path.name)
            if named is not None:
                began = _seconds(named[1])
                files.append((began + int(named[2]), began, path))
        sizes = {path: _size(path) for *_, path in files}
        self._bytes = sum(sizes.values())
        over = self._bytes + needed > self._max_bytes
        for end, began, path in sorted(files):
            apart = end <= now or began > now + self._seconds
            most = min(0.9 * self._max_bytes, self._max_bytes - needed)
            full = over and apart and self._bytes > most
            if full or end + self._max_age_s < now:
                path.unlink(missing_ok=True)
                self._bytes -= sizes[path]

    def _start(self, seconds: float) -> int:
        return int(seconds // self._seconds) * self._seconds

    def _append(self, header: LogHeader, record: LoggedExchange | LoggedCounters) -> None:
        stamp = datetime.fromtimestamp(header.start, UTC).strftime(STAMP)
        name = f"{header.kind}-{stamp}-{header.seconds}s-{self._name}{SUFFIX}"
        line = to_line(record)
        heading = to_line(header)
        most = len(heading) + len(line)
        if self._bytes + most > self._max_bytes:
            self.remove_old(most)
        if self._bytes + most > self._max_bytes:
            raise OSError(errno.EDQUOT, f"the slice has all of --log-max-bytes {self._max_bytes}")
        self.folder.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
        _append_whole(self.folder / name, heading, line)
        self._bytes += most


def _append_whole(path: Path, heading: bytes, line: bytes) -> None:
    """One write: it is there after a kill, and of one that was killed within it at most a beginning
    without its end, which the reader leaves out. A file that is new, or was removed, begins with
    the heading."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, PRIVATE_FILE)
    try:
        size = os.fstat(file).st_size
        data = line if size else heading + line
        try:
            written = os.write(file, data)
            if written < len(data):  # as on a disk that is filled by it
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            with suppress(OSError):
                os.ftruncate(file, size)
            raise
    finally:
        os.close(file)


def _seconds(stamp: str) -> float:
    return datetime.strptime(stamp, STAMP).replace(tzinfo=UTC).timestamp()


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # another writer removes old ones too
        return 0
