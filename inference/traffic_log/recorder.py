"""Records exchanges beside the traffic: a thread redacts and writes them, and whatever fails there
is counted and told, while the traffic goes on."""

from __future__ import annotations

import logging
import queue
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from draftsmith.inference.traffic_log.log_options import LogOptions
from draftsmith.inference.traffic_log.records import LoggedCounters, LoggedExchange
from draftsmith.inference.traffic_log.redaction import Redaction, read_redaction, unredacted
from draftsmith.inference.traffic_log.writer import LogWriter

logger = logging.getLogger(__name__)

MOST_WAITING_BYTES = 64 * 1024**2  # of exchanges that are not written yet; others are dropped
REMOVE_EVERY_S = 600.0  # between looks for files that are too old
CLOSE_TIMEOUT_S = 10.0  # for what still waits when the server ends

Exchanges = Callable[[], Sequence[LoggedExchange]]


@dataclass(frozen=True)
class Draw:
    """A request that may be logged: when it came (seconds since 1970), and its key."""

    time: float
    key: float


class Recorder:
    """The log in a folder. Its methods may be called by any thread, take microseconds and raise
    nothing; only the constructor raises a ConfigError, before there is traffic."""

    def __init__(self, folder: Path, options: LogOptions) -> None:
        self._writer = LogWriter(folder, options)
        self._redact: Redaction = unredacted
        if options.log_redact is not None:
            self._redact = read_redaction(options.log_redact)
        self._jobs: queue.SimpleQueue[tuple[Callable[[], None], int] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._waiting_bytes = 0
        self._counts = {"written": 0, "left_out": 0, "dropped": 0, "failed": 0}
        self._error: str | None = None
        self._thread = threading.Thread(target=self._run, name="traffic log", daemon=True)
        self._thread.start()

    def draw(self) -> Draw | None:
        """For a request that has just come; None if it is none of the sample."""
        draw = Draw(time.time(), random.random())
        return draw if self._writer.wants(draw.time, draw.key) else None

    def record(self, draw: Draw, exchanges: Exchanges, size: int) -> None:
        """Has the exchanges of a request written, which the thread makes by a call. `size`: bytes
        that are held until then."""
        self._enqueue(lambda: self._write_exchanges(draw, exchanges()), size)

    def record_counters(self, counters: LoggedCounters) -> None:
        """Has what the server's counters grew by written."""
        self._enqueue(lambda: self._write(counters), 0)

    def health(self) -> dict[str, Any]:
        """`ok`: the last thing to write was written. Counts of exchanges: written; left out by the
        redaction, or as what cannot be read; dropped, as the thread was behind; failed. `error`:
        what failed last."""
        with self._lock:
            return {"ok": self._error is None, "error": self._error, **self._counts}

    def close(self) -> None:
        """Writes what still waits."""
        self._jobs.put(None)
        self._thread.join(CLOSE_TIMEOUT_S)

    def _enqueue(self, job: Callable[[], None], size: int) -> None:
        with self._lock:
            if self._waiting_bytes + size > MOST_WAITING_BYTES:
                self._counts["dropped"] += 1
                return
            self._waiting_bytes += size
        self._jobs.put((job, size))

    def _run(self) -> None:
        remove_at = time.monotonic() + REMOVE_EVERY_S
        while True:
            left = remove_at - time.monotonic()
            if left <= 0:
                self._attempt(self._writer.remove_old)
                remove_at = time.monotonic() + REMOVE_EVERY_S
                continue
            try:
                entry = self._jobs.get(timeout=left)
            except queue.Empty:
                continue
            if entry is None:
                return
            job, size = entry
            self._attempt(job)
            with self._lock:
                self._waiting_bytes -= size

    def _attempt(self, job: Callable[[], None]) -> None:
        """The traffic must not stop for any error of the log, a user's function among it."""
        try:
            job()
        except Exception as error:
            self._fail(_told(error))

    def _fail(self, error: str) -> None:
        with self._lock:
            self._counts["failed"] += 1
            first = self._error is None
            self._error = error
        if first:
            logger.error("the log fails, and the traffic goes on: %s", error)

    def _write_exchanges(self, draw: Draw, exchanges: Sequence[LoggedExchange]) -> None:
        if not exchanges:
            self._count("left_out")
        for exchange in exchanges:
            redacted = self._redact(exchange)
            if redacted is None:
                self._count("left_out")
                continue
            # neither is the redaction's to change: the sample would not be one
            self._write(replace(redacted, time=draw.time, key=draw.key))

    def _write(self, record: LoggedExchange | LoggedCounters) -> None:
        written = self._writer.write(record)
        with self._lock:
            self._error = None
            self._counts["written"] += written

    def _count(self, name: str) -> None:
        with self._lock:
            self._counts[name] += 1


def _told(error: Exception) -> str:
    """What may be told of an error to whoever asks: a redaction's own words may hold what it was to
    remove."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return type(error).__name__
