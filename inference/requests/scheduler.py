"""Which request holds which row: continuous batching between rounds.

The rows in use are always 0 .. len(running) - 1, so that a forward takes a contiguous slice of
every cache: whoever owns rows of memory moves them as `release` says."""

from __future__ import annotations

from collections import deque

from draftsmith.inference.requests.request import Request


class Scheduler:
    """First come, first served; at most `max_num_seqs` rows. `running[row]` is the request in a
    row."""

    def __init__(self, max_num_seqs: int) -> None:
        self.max_num_seqs = max_num_seqs
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    @property
    def has_unfinished(self) -> bool:
        """True while a request runs or waits."""
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        """The request waits behind all others."""
        self.waiting.append(request)

    def admit(self) -> list[Request]:
        """Gives the free rows to those who wait longest; returns them in the order of their rows:
        the longest prompt first, so that rows with tokens left to prefill are neighbours."""
        free = min(self.max_num_seqs - len(self.running), len(self.waiting))
        admitted = [self.waiting.popleft() for _ in range(free)]
        admitted.sort(key=lambda request: -request.num_prompt_tokens)
        self.running += admitted
        return admitted

    def release(self, row: int) -> int | None:
        """Frees a row. The last row takes its place: returns that row's old number, or None if it
        was the last."""
        last = self.running.pop()
        if row == len(self.running):
            return None
        self.running[row] = last
        return len(self.running)
