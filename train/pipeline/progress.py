"""The progress of a run: stages, a bar with the time left, a few numbers.

On a terminal it is one live bar; elsewhere (logs, CI) a line when a stage begins and now and then
while it lasts. Only the main process prints."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

LINE_EVERY = 15.0  # seconds between lines where there is no terminal
# (done, note="", total=None): units finished, and a short text beside the bar
Advance = Callable[..., None]


class Stages:
    """`with stages.stage("train", total) as advance: advance(done, "loss 1.2")`."""

    def __init__(self, *, enabled: bool = True, console: Console | None = None) -> None:
        self.enabled, self.console = enabled, console or Console()

    def say(self, text: str) -> None:
        """One line of information."""
        if self.enabled:
            self.console.print(text, highlight=False)

    @contextmanager
    def stage(self, name: str, total: int | None = None) -> Iterator[Advance]:
        """A stage of `total` units (None: not known); times itself and says how long it took."""
        began = time.monotonic()
        if not self.enabled:
            yield lambda done, note="", total=None: None
            return
        columns = (
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}", style="dim"),
        )
        with Progress(
            *columns, console=self.console, transient=True, disable=not self.console.is_terminal
        ) as bar:
            bar.add_task(name, total=total, note="")
            task, last = bar.tasks[0], began
            if not self.console.is_terminal:
                self.say(name)

            def advance(done: float, note: str = "", total: float | None = None) -> None:
                nonlocal last
                bar.update(task.id, completed=done, total=total, note=note)  # None: as it was
                if self.console.is_terminal or time.monotonic() - last < LINE_EVERY:
                    return
                last = time.monotonic()
                left = f"{task.time_remaining:.0f} s left" if task.time_remaining else ""
                parts = filter(None, [f"{name}: {done:g}/{task.total or '?'}", left, note])
                self.console.print(", ".join(parts), markup=False, highlight=False)

            yield advance
        self.say(f"{name}: {time.monotonic() - began:.1f} s")
