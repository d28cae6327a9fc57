"""Evaluation suites by name: the public files on which acceptance lengths are published, read as
conversations.

No file of a suite comes with this package. It is given by path; suites.json has the command that
fetches it (docs/evaluate.md). Prompts are sent as they stand in the file, as the user's turns.
Imports nothing of an engine, since load generation and the selection of training data read suites
too."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftsmith.speculators.errors import ConfigError, DataError

DIR = "suites"  # where files lie that no path is given for, each under its suite's name
# in place of texts that SPEED-Bench may not ship
SENTINEL = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"


@dataclass(frozen=True)
class SuiteConversation:
    """The user's turns of one row; the answers are still to be written. `origin` is for errors, as
    `f.jsonl:12`."""

    category: str
    turns: tuple[str, ...]
    origin: str


@dataclass(frozen=True)
class Suite:
    """A suite, and the shape of its file: a JSON object a line.

    fetch       shell command that writes the file
    columns     the first of these that a row has holds its turns: a text, a list of texts, or
                messages of the user
    category    the column that groups rows; None: all are of one category, called like the suite
    """

    title: str
    fetch: str
    columns: Sequence[str]
    category: str | None = None


SUITES = {
    name: Suite(**fields)
    for name, fields in json.loads(
        Path(__file__).with_suffix(".json").read_text(encoding="utf-8")
    ).items()
}


def default_path(name: str) -> str:
    """Where the file of a suite lies that no path is given for."""
    return f"{DIR}/{name}.jsonl"


def load_suite(name: str, path: str | Path) -> list[SuiteConversation]:
    """The conversations of a suite's file, in its order.

    DataError for a file that is not there, with the command for it, for one without rows, and, with
    file and line, for a row that has not the suite's shape."""
    suite = SUITES[name]
    file = Path(path)
    if not file.is_file():
        fetch = f"Fetch it (docs/evaluate.md): mkdir -p {DIR}; {suite.fetch}"
        raise DataError(f"no such file. {fetch}", where=f"suite {name}: {file}")
    rows = [_conversation(name, suite, row, origin) for origin, row in json_lines(file)]
    if not rows:
        raise DataError("there are no rows", where=f"{file}")
    return rows


def read_prompts(file: Path) -> list[str]:
    """The column `prompt` of a JSONL file. DataError for a row without a text there."""
    prompts = []
    for origin, row in json_lines(file):
        match row:
            case {"prompt": str(prompt)} if prompt:
                prompts.append(prompt)
            case _:
                raise DataError("expected an object with `prompt`, a text", where=origin)
    return prompts


def json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    """(`path:line`, value) of every line of a JSONL file, `.gz` or not. ConfigError if it cannot be
    read, DataError for a line that is no JSON."""
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8-sig")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error  # without the path, which `where` has
        raise ConfigError(f"could not be read as lines of JSON: {why}", where=f"{path}") from None
    # not `splitlines`, which also cuts at U+2028 and others: JSON has them as they are in texts
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                yield f"{path}:{number}", json.loads(line)
            except ValueError as error:
                raise DataError(f"{error}: {line[:80]}", where=f"{path}:{number}") from None


def _conversation(name: str, suite: Suite, row: Any, origin: str) -> SuiteConversation:
    fields = row if isinstance(row, dict) else {}
    column = next((column for column in suite.columns if fields.get(column)), None)
    turns = _turns(fields[column]) if column else []
    category = name if suite.category is None else fields.get(suite.category)
    if not turns or not all(turn.strip() for turn in turns):
        fault = f"expected {' or '.join(suite.columns)}, the turns of the user"
    elif any(SENTINEL in turn for turn in turns):
        fault = f"a text is left out of this file; make the whole one with: {suite.fetch}"
    elif not isinstance(category, str) or category in ("", "all"):  # reports pool as `all`
        fault = f"expected {suite.category}, a text other than all"
    else:
        return SuiteConversation(category, tuple(turns), origin)
    raise DataError(f"{fault}: {json.dumps(row)[:80]}", where=origin)


def _turns(value: Any) -> list[str]:
    """Texts of the user from a text, a list of texts, or a list of messages; empty if it is none of
    them."""
    texts = []
    for part in value if isinstance(value, list) else [value]:
        by_user = isinstance(part, dict) and part.get("role") == "user"
        text = part.get("content") if by_user else part
        if not isinstance(text, str):
            return []
        texts.append(text)
    return texts
