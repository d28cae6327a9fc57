"""Rows that cannot be used: each is listed with its place and its reason, and the others go on.

There are two kinds. A *damaged* row is wrong in itself (not JSON, no role, an empty turn): it is
left out and reported, and a run stops only at the bounds its recipe sets. A mask that cannot be
*proved* is more often the fault of a template or tokenizer than of one row: it stops the run unless
the recipe says to drop such rows."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any, Literal

from speculators.errors import DataError

DAMAGES = {
    "not_json": "not JSON",
    "not_utf8": "bytes that are not UTF-8 text",
    "torn_file": "a file that breaks off",
    "duplicate_key": "a key that is given twice",
    "too_deep": "nested too deeply",
    "wrong_type": "a value of the wrong type",
    "missing_column": "no column with a conversation",
    "unknown_role": "a turn whose role is missing or unknown",
    "empty_turn": "a turn without text",
    "no_conversation": "no turn beside the system prompt",
    "assistant_first": "an assistant turn that nothing comes before",
    "no_response": "no assistant turn to learn from",
    "bad_tool_call": "a tool call or tool that cannot be read",
    "lone_surrogate": "half of a surrogate pair, which is no character",
}
UNPROVED = {
    "template_refuses": "the chat template refuses the conversation",
    "not_shown": "the chat template leaves out part of a turn",
    "boundary": "a turn that changes the tokens before it",
    "unlike_prompt": "a turn rendered unlike its generation prompt",
    "no_mask": "no token of a turn is marked",
}
REASONS = DAMAGES | UNPROVED
QUOTED = 400  # characters of a message that are kept


class BadRow(DataError):
    """One row that cannot be used: `origin` its place (`chats.jsonl:12`), `reason` one of REASONS,
    `what` in words."""

    def __init__(self, origin: str, reason: str, what: str) -> None:
        super().__init__(origin, reason, what)  # the arguments of the copy that pickle makes
        self.origin, self.reason, self.what = origin, reason, what

    def __str__(self) -> str:
        return f"{self.origin}: {self.what}"


class BadRows:
    """The rows that were left out: written to `path` (JSON lines) as they come, and counted by
    reason.

    `refuse` raises instead where the recipe says so: for an unproved mask if `on_bad_row` is
    "error", and for any row once more than `max_rows` are bad; `finish` where more than the share
    `max_share` of the rows read is."""

    def __init__(
        self,
        path: Path | None = None,
        *,
        on_bad_row: Literal["error", "drop"] = "drop",
        max_rows: int | None = None,
        max_share: float | None = None,
    ) -> None:
        self.path, self.on_bad_row, self.max_rows, self.max_share = (
            path,
            on_bad_row,
            max_rows,
            max_share,
        )
        self.use, self.read, self.entries = "train", 0, list[dict[str, Any]]()
        self._counts: dict[str, Counter[str]] = {}
        self._known: set[tuple[str, str]] = set()
        if path is not None:
            path.unlink(missing_ok=True)

    def begin(self, use: str) -> BadRows:
        """Begins the rows of `use` ("train", "validation"), which have counts and bounds of their
        own."""
        self.use, self.read = use, 0
        return self

    def refuse(self, error: BadRow) -> None:
        """Reports `error` and returns, or raises DataError. A row used several times is reported
        once."""
        if error.reason in UNPROVED and self.on_bad_row == "error":
            raise DataError(
                f"{error} (data.on_bad_row: drop leaves such rows out and reports them)"
            ) from error
        if (self.use, error.origin) in self._known:
            return
        self._known.add((self.use, error.origin))
        what = _printable(error.what)
        entry = {
            "use": self.use,
            "origin": _printable(error.origin),
            "reason": error.reason,
            "what": what[:QUOTED],
        }
        self.entries.append(entry)
        self._counts.setdefault(self.use, Counter())[error.reason] += 1
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry, ensure_ascii=False) + "\n")
        if self.max_rows is not None and self.count() > self.max_rows:
            raise DataError(
                f"data.max_bad_rows: more than {self.max_rows} bad rows, the last of them"
                f" {error}{self._listed()}"
            )

    def finish(self) -> None:
        """Raises DataError if too large a share of the rows read was bad."""
        bad = self.count()
        if self.max_share is not None and bad > self.max_share * self.read:
            raise DataError(
                f"data.max_bad_share: {bad} of {self.read} rows ({bad / self.read:.1%}) are bad,"
                f" more than {self.max_share:.1%}: {self._counted()}; the first is"
                f" {self.first()}{self._listed()}"
            )

    def count(self) -> int:
        return self._counts.get(self.use, Counter()).total()

    def by_reason(self) -> dict[str, int]:
        """Counts, the most frequent first."""
        return dict(self._counts.get(self.use, Counter()).most_common())

    def first(self, reason: str | None = None) -> str:
        """The first bad row (of one reason) as text; empty if there is none."""
        matching = (
            e for e in self.entries if e["use"] == self.use and reason in (None, e["reason"])
        )
        return next((f"{e['origin']}: {e['what']}" for e in matching), "")

    def __str__(self) -> str:
        """One line, empty if nothing was left out."""
        if not self.count():
            return ""
        return f"{self.count()} of {self.read} rows left out: {self._counted()}{self._listed()}"

    def _counted(self) -> str:
        return ", ".join(f"{count} {reason}" for reason, count in self.by_reason().items())

    def _listed(self) -> str:
        return f" ({self.path} lists them)" if self.path is not None else ""


def _printable(text: str) -> str:
    """`text` without lone surrogates, which no file takes."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
