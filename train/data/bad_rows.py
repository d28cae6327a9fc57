"""Rows that cannot be used: damaged ones, and conversations whose mask cannot be proved.

By `data.on_bad_row` the first one stops the run, or they are listed with place and reason, up to a
share of all rows."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from draftsmith.speculators.errors import DataError
from draftsmith.speculators.export import disk_errors

QUOTED = 400  # characters of a reason that are kept


class BadRow(DataError):
    """One row that cannot be used: `origin` is its place (`chats.jsonl:12`), `what` the reason."""

    def __init__(self, origin: str, what: str) -> None:
        self.origin = origin
        self.what = what.encode("utf-8", "backslashreplace").decode()  # for files and terminals
        super().__init__(self.what, where=origin)

    def __reduce__(self) -> tuple[Any, ...]:
        return BadRow, (self.origin, self.what)


class BadRows:
    """The rows of one use that were left out: written to `path` (JSON lines) as they come.

    stop       the first one raises DataError
    max_share  of the rows that may be bad
    read       rows of this use, bad ones included
    shortened  conversations that lost the turns before the user's first
    reasons    of the bad ones, by their place
    """

    def __init__(
        self, path: Path | None = None, *, stop: bool = False, max_share: float = 1.0
    ) -> None:
        self.path = path
        self.stop = stop
        self.max_share = max_share
        self.read = 0
        self.shortened = 0
        self.reasons: dict[str, str] = {}
        if path is not None:
            path.unlink(missing_ok=True)

    def refuse(self, error: BadRow) -> None:
        """Lists a row, once if it is used several times; or raises DataError."""
        if self.stop:
            hint = "data.on_bad_row: drop leaves such rows out and lists them"
            raise DataError(f"{error} ({hint})") from error
        if error.origin in self.reasons:
            return
        self.reasons[error.origin] = error.what[:QUOTED]
        if self.path is not None:
            entry = {"origin": error.origin, "what": error.what[:QUOTED]}
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with disk_errors(self.path), self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry, ensure_ascii=False) + "\n")

    def listed(self, start: int) -> list[tuple[str, str]]:
        """Place and reason of the bad rows from number `start` on."""
        return list(self.reasons.items())[start:]

    def refuse_again(self, rows: Iterable[tuple[str, str]]) -> None:
        """Refuses rows that were `listed` when the same examples were tokenised, as then."""
        for origin, what in rows:
            self.refuse(BadRow(origin, what))
        self.check_share()

    @property
    def share(self) -> float:
        """Of the rows read so far, those that are bad."""
        return len(self.reasons) / max(self.read, 1)

    def check_share(self) -> None:
        """DataError if more than `max_share` of the rows are bad."""
        if self.share > self.max_share:
            raise DataError(
                f"{self.share:.1%} of the rows are bad, {self.max_share:.1%} may be; mend the data,"
                f" or raise this key. {self}",
                where="data.max_bad_row_share",
            )

    def __str__(self) -> str:
        """One line, empty if nothing was left out."""
        parts = []
        if self.shortened:
            parts.append(
                f"{self.shortened} of {self.read} conversations begin with the assistant: their"
                " turns before the user's first are left out"
            )
        if self.reasons:
            origin, what = next(iter(self.reasons.items()))
            listed = "" if self.path is None else f" ({self.path} lists them)"
            count = f"{len(self.reasons)} of {self.read} rows left out{listed}"
            parts.append(f"{count}, the first: {origin}: {what}")
        return "; ".join(parts)
