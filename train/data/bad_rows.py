"""Rows that cannot be used: damaged ones, and conversations whose mask cannot be proved.

By the recipe's `data.on_bad_row` the first one stops the run, or they are left out and listed with
their place and the reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from draftsmith.speculators.errors import DataError

QUOTED = 400  # characters of a reason that are kept
MANY = 0.05  # of the rows, above which what is left out is warned of


class BadRow(DataError):
    """One row that cannot be used: `origin` is its place (`chats.jsonl:12`), `what` the reason."""

    def __init__(self, origin: str, what: str) -> None:
        self.origin = origin
        self.what = what.encode("utf-8", "backslashreplace").decode()  # for files and terminals
        super().__init__(self.what, where=origin)

    def __reduce__(self) -> tuple[Any, ...]:
        return BadRow, (self.origin, self.what)


class BadRows:
    """The rows that were left out: written to `path` (JSON lines) as they come, and counted.

    stop   the first one raises DataError
    use    of the rows that are read now ("train", "validation"); each use has its own counts
    read   rows of this use, bad ones included
    """

    def __init__(self, path: Path | None = None, *, stop: bool = False) -> None:
        self.path, self.stop, self.use, self.read = path, stop, "train", 0
        self._reasons: dict[str, dict[str, str]] = {}  # by use and place
        if path is not None:
            path.unlink(missing_ok=True)

    def begin(self, use: str) -> BadRows:
        """Begins the rows of `use`."""
        self.use, self.read = use, 0
        return self

    def refuse(self, error: BadRow) -> None:
        """Lists a row, once if it is used several times; or raises DataError."""
        if self.stop:
            hint = "data.on_bad_row: drop leaves such rows out and lists them"
            raise DataError(f"{error} ({hint})") from error
        reasons = self._reasons.setdefault(self.use, {})
        if error.origin in reasons:
            return
        what = error.what[:QUOTED]
        reasons[error.origin] = what
        if self.path is not None:
            entry = {"use": self.use, "origin": error.origin, "what": what}
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry, ensure_ascii=False) + "\n")

    @property
    def reasons(self) -> dict[str, str]:
        """The reason of each bad row of this use, by its place."""
        return self._reasons.get(self.use, {})

    def first(self) -> str:
        """The first bad row as text; empty if there is none."""
        return next((f"{origin}: {what}" for origin, what in self.reasons.items()), "")

    def __str__(self) -> str:
        """One line, empty if nothing was left out."""
        count = len(self.reasons)
        if not count:
            return ""
        warning = "warning: " if count > MANY * self.read else ""
        listed = "" if self.path is None else f" ({self.path} lists them)"
        return f"{warning}{count} of {self.read} rows left out{listed}, the first: {self.first()}"
