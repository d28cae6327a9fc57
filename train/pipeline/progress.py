"""The progress of a run: numbered stages, a bar with the time left, a few numbers.

On a terminal it is one live bar; elsewhere (logs, CI) a line when a stage begins and now and then while it lasts. Only
the main process prints.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

LINE_EVERY = 15.0  # seconds between lines where there is no terminal


class Stages:
    """`with stages.stage("train", total) as advance: advance(done, "loss 1.2")`."""

    def __init__(self, total: int, *, enabled: bool = True, console: Console | None = None) -> None:
        self.total, self.number, self.enabled = total, 0, enabled
        self.console = console or Console(stderr=False)

    def say(self, text: str) -> None:
        """One line of information."""
        if self.enabled:
            self.console.print(text, highlight=False)

    @contextmanager
    def stage(self, name: str, total: int | None = None) -> Iterator[_Advance]:
        """A stage of `total` units (None: not known); times itself and says how long it took."""
        self.number += 1
        title, began = f"[{self.number}/{self.total}] {name}", time.monotonic()
        if not self.enabled:
            yield _Advance(None, None, title, total)
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
        with Progress(*columns, console=self.console, transient=True, disable=not self.console.is_terminal) as bar:
            task = bar.add_task(title.replace("[", r"\["), total=total, note="")
            if not self.console.is_terminal:
                self.console.print(title, markup=False, highlight=False)
            yield _Advance(bar, task, title, total)
        self.say(f"{title.replace('[', chr(92) + '[')}: {time.monotonic() - began:.1f} s")


class _Advance:
    def __init__(self, bar: Progress | None, task, title: str, total: int | None) -> None:
        self.bar, self.task, self.title, self.total = bar, task, title, total
        self.began = self.last = time.monotonic()

    def __call__(self, done: float, note: str = "", total: float | None = None) -> None:
        """`done` of `total` units are finished; `note` is a short text beside the bar."""
        if self.bar is None:
            return
        self.total = total or self.total
        self.bar.update(self.task, completed=done, total=self.total, note=note)
        now = time.monotonic()
        if self.bar.console.is_terminal or now - self.last < LINE_EVERY:
            return
        self.last = now
        left = f", {(now - self.began) / done * (self.total - done):.0f} s left" if self.total and done else ""
        self.bar.console.print(
            f"{self.title}: {done:g}/{self.total or '?'}{left} {note}", markup=False, highlight=False
        )
