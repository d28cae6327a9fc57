"""Which request holds which row: continuous batching between rounds.

The rows in use are always 0 .. len(running) - 1, so that a forward takes a contiguous slice of
every cache. Knows no tensors and no memory: whoever owns rows of memory says how many requests
there is room for, and moves rows as `release` and `preempt` say."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence

from inference.requests.request import Request
from speculators.errors import ConfigError


class Scheduler:
    """First come, first served; at most `max_num_seqs` rows. `running[row]` is the request in a
    row.

    Whoever runs came before everyone who waits: nobody is overtaken, and who came last gives way
    first."""

    def __init__(self, max_num_seqs: int) -> None:
        if max_num_seqs < 1:
            raise ConfigError(f"max_num_seqs={max_num_seqs}; expected at least 1")
        self.max_num_seqs = max_num_seqs
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._arrivals = itertools.count()

    @property
    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        request.arrival = next(self._arrivals)
        self.waiting.append(request)

    def candidates(self) -> list[Request]:
        """Those who wait and for whom there are rows, in the order of their arrival."""
        return list(itertools.islice(self.waiting, self.max_num_seqs - len(self.running)))

    def admit(self, requests: Sequence[Request]) -> None:
        """Gives the next free rows to these, who were waiting."""
        for request in requests:
            self.waiting.remove(request)
        self.running += requests

    def youngest(self) -> int:
        """The row of the request that came last."""
        return max(range(len(self.running)), key=lambda row: self.running[row].arrival)

    def preempt(self, row: int) -> int | None:
        """Frees a row, as `release` does; its request waits again, before the others."""
        self.waiting.appendleft(self.running[row])
        return self.release(row)

    def release(self, row: int) -> int | None:
        """Frees a row. The last row takes its place: returns that row's old number, or None if it
        was the last."""
        last = self.running.pop()
        if row == len(self.running):
            return None
        self.running[row] = last
        return len(self.running)
