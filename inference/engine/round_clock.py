"""Times the parts of an engine's rounds: verification, the drafter's forward and head, sampling and
the rest.

The methods of a round (`Engine.timed_methods`) are wrapped while the clock runs, and an engine
without a clock runs as ever. On CUDA the wrappers record events, so that the host waits for the
device once, when the times are read; a part is then what the device's stream took between two
events, with what it waited there for the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any, NamedTuple

import torch

from draftsmith.inference.engine.engine import Engine
from draftsmith.inference.report.round_cost import RoundTime


class _Lap(NamedTuple):
    """From `mark` on, until the next one, time is that of `part`."""

    part: str
    mark: Any


class _Laps(NamedTuple):
    """A round: its rows, its drafts, and where its parts begin."""

    rows: int
    drafts: int
    laps: list[_Lap]
    end: Any


class RoundClock:
    """Times the rounds that `engine`, on a CPU or on CUDA, runs within `running`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._events = engine.target.device.type == "cuda"
        self._round: list[_Lap] | None = None  # the one that runs
        self._ended: list[_Laps] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """Times rounds until the block ends."""
        methods = self._engine.timed_methods()
        for owner, name, part in methods:
            original = getattr(owner, name)
            wrap = self._timed_round if name == "_round" else self._timed_part
            setattr(owner, name, wrap(original, part))
        try:
            yield
        finally:
            self._round = None
            for owner, name, _ in methods:
                delattr(owner, name)  # the class's own is there again

    def times(self) -> list[RoundTime]:
        """The rounds so far, which are forgotten; on CUDA it waits for the last one."""
        rounds = self._ended
        self._ended = []
        if rounds and self._events:
            rounds[-1].end.synchronize()
        return [
            RoundTime(laps.rows, laps.drafts, self._seconds(laps.laps, laps.end)) for laps in rounds
        ]

    def _seconds(self, laps: list[_Lap], end: Any) -> dict[str, float]:
        """By part, of the laps of a round."""
        seconds: dict[str, float] = {}
        marks = [lap.mark for lap in laps[1:]] + [end]
        for lap, following in zip(laps, marks, strict=True):
            took = lap.mark.elapsed_time(following) / 1000 if self._events else following - lap.mark
            seconds[lap.part] = seconds.get(lap.part, 0.0) + took
        return seconds

    def _mark(self) -> Any:
        """This moment: of the host, or of the device's stream."""
        if not self._events:
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _timed_round(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        def timed(rows: list[Any]) -> Any:
            served = len(rows)  # finished ones leave the list
            before = self._engine.counters.num_draft_tokens
            self._round = [_Lap(part, self._mark())]
            finished = function(rows)
            drafts = self._engine.counters.num_draft_tokens - before
            self._ended.append(_Laps(served, drafts, self._round, self._mark()))
            self._round = None
            return finished

        return timed

    def _timed_part(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            laps = self._round
            if laps is None:  # in a prefill
                return function(*args, **kwargs)
            outer = laps[-1].part
            laps.append(_Lap(part, self._mark()))
            result = function(*args, **kwargs)
            laps.append(_Lap(outer, self._mark()))
            return result

        return timed
