"""The progress of a command: stages, a bar with the time left, a few words, and that it still
works.

On a terminal a stage is one live bar; elsewhere (logs, CI) a line when it begins and now and then
while it lasts. Whatever works without a word for SILENCE seconds is named by the heartbeat. Only
the main process prints."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

LINE_EVERY = 10.0  # seconds between lines where there is no terminal
SILENCE = 15.0  # seconds without a line, after which the heartbeat says what works


class Advance(Protocol):
    """How far a stage is: units done, what is under way in a few words, and the total where it is
    not the one that the stage began with. Shares of a whole have a total of 1."""

    def __call__(self, done: float, note: str = "", total: float | None = None) -> None:
        """`done` units of the stage are done, and `note` is under way."""


def unwatched(done: float, note: str = "", total: float | None = None) -> None:
    """An `Advance` that shows nothing."""


@dataclass
class Activity:
    """Something under way since `began`. `shown`: a bar or another process tells of it."""

    name: str
    began: float
    console: Console
    shown: bool = False
    note: str = ""


class Heartbeat:
    """Names what is under way where nothing was said for SILENCE seconds. `clock`: seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.last_line = clock()
        self.activities: list[Activity] = []  # the innermost is the last

    @contextmanager
    def activity(self, name: str, console: Console, *, shown: bool = False) -> Iterator[Activity]:
        """Something that is under way within the block."""
        activity = Activity(name, self.clock(), console, shown)
        if not self.activities:
            self.heard()
        self.activities.append(activity)
        try:
            yield activity
        finally:
            self.activities.remove(activity)

    def heard(self) -> None:
        """Something was printed, after which it is quiet for SILENCE seconds."""
        self.last_line = self.clock()

    def print(self, console: Console, text: str, **options: Any) -> None:
        """One line."""
        self.heard()
        console.print(text, highlight=False, soft_wrap=True, **options)

    def beat(self) -> None:
        """A line on the innermost activity, if one is due."""
        innermost = self.activities[-1:]
        if not innermost or innermost[0].shown or self.clock() - self.last_line < SILENCE:
            return
        activity = innermost[0]
        work = ": ".join(filter(None, (activity.name, activity.note)))
        seconds = self.clock() - activity.began
        self.print(activity.console, f"… still {work} ({seconds:.0f} s)", markup=False)

    @contextmanager
    def running(self) -> Iterator[None]:
        """A thread beats within the block, in the main process."""
        stopped = threading.Event()

        def watch() -> None:
            while not stopped.wait(1.0):
                self.beat()

        thread = threading.Thread(target=watch, name="heartbeat", daemon=True)
        if os.environ.get("RANK", "0") == "0":
            thread.start()
        try:
            yield
        finally:
            stopped.set()


HEARTBEAT = Heartbeat()  # of this process, which has one terminal or log


class Stages:
    """`with stages.stage("train", total) as advance: advance(done, "loss 1.2")`."""

    def __init__(
        self,
        *,
        enabled: bool = True,
        console: Console | None = None,
        heartbeat: Heartbeat = HEARTBEAT,
    ) -> None:
        self.enabled = enabled
        self.console = console or Console()
        self.heartbeat = heartbeat

    def say(self, text: str) -> None:
        """One line of information."""
        if self.enabled:
            self.heartbeat.print(self.console, text)

    @contextmanager
    def stage(self, name: str, total: float | None = None) -> Iterator[Advance]:
        """A stage of `total` units (None: not known; 1: shares); times itself and says how long it
        took."""
        if not self.enabled:
            yield unwatched
            return
        live = self.console.is_terminal
        clock = self.heartbeat.clock
        with (
            self.heartbeat.activity(name, self.console, shown=live) as activity,
            _bar(self.console, clock) as bar,
        ):
            bar.add_task(name, total=total, note="", position="")
            task = bar.tasks[0]
            if not live:
                self.heartbeat.print(self.console, name, markup=False)

            def advance(done: float, note: str = "", total: float | None = None) -> None:
                position = position_text(done, total or task.total)
                # a total of None: as it was
                bar.update(task.id, completed=done, total=total, note=note, position=position)
                activity.note = ", ".join(filter(None, (position, note)))
                if live or clock() - self.heartbeat.last_line < LINE_EVERY:
                    return
                left = f"{task.time_remaining:.0f} s left" if task.time_remaining else ""
                line = f"{name}: " + ", ".join(filter(None, (position, left, note)))
                self.heartbeat.print(self.console, line, markup=False)

            yield advance
        seconds = clock() - activity.began
        self.heartbeat.print(self.console, f"{name}: {seconds:.1f} s", markup=False)


def _bar(console: Console, clock: Callable[[], float]) -> Progress:
    """The live bar of a stage; shows nothing where there is no terminal."""
    return Progress(
        TextColumn("{task.description}", style="bold", markup=False),
        BarColumn(),
        TextColumn("{task.fields[position]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}", style="dim", markup=False),
        console=console,
        transient=True,
        disable=not console.is_terminal,
        get_time=clock,
    )


def position_text(done: float, total: float | None) -> str:
    """`35 %` of a share, `7/20` of units; never more than the whole."""
    if total is None:
        return f"{done:g}"
    if total == 1:
        return f"{min(done, 1):.0%}".replace("%", " %")
    return f"{min(done, total):g}/{total:g}"


def counted(number: int, one: str, many: str = "") -> str:
    """A number of things in words: `1 prompt`, `1,200 prompts`. `many`: where it is not `one` and
    an s."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"
