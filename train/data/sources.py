"""Examples from files and the Hub, source by source: `readers.py` reads the rows, and `examples.py`
says what a row means."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path

from draftsmith.speculators.errors import DataError
from draftsmith.train.data.bad_rows import BadRow, BadRows
from draftsmith.train.data.examples import Example, parse_row
from draftsmith.train.data.readers import rows_of
from draftsmith.train.data.selection import mix
from draftsmith.train.recipe.data_sections import Source


@contextmanager
def errors_of_option(option: str, path: str | Path) -> Iterator[None]:
    """Names the option that gave a path, or a row below it, in the DataError of either."""
    try:
        yield
    except DataError as error:
        where = error.where or ""
        if not where.startswith(f"{path}"):
            raise
        message = str(error).removeprefix(f"{where}: ")
        raise DataError(message, where=f"{option} {where}") from error


def load_sources(sources: Sequence[Source], *, bad: BadRows | None = None) -> list[Example]:
    """The examples of all sources, in order, as often as their weights say. A damaged row goes to
    `bad`; without one it raises."""
    return mix(sources, read_sources(sources, bad=bad))


def read_sources(sources: Sequence[Source], *, bad: BadRows | None = None) -> list[list[Example]]:
    """The examples of each source, at most its `limit`. DataError for a source without any, and for
    more bad rows than `bad` takes."""
    lists = [read_source(source, bad=bad) for source in sources]
    if bad is not None:
        bad.check_share()
    return lists


def read_source(source: Source, *, bad: BadRows | None = None) -> list[Example]:
    """The examples of a source, at most its `limit`. DataError if there are none."""
    examples = list(islice(load_source(source, bad=bad), source.limit))
    if not examples:
        raise DataError(f"the source holds no examples. {bad or ''}".rstrip(), where=source.label)
    return examples


def load_source(source: Source, *, bad: BadRows | None = None) -> Iterator[Example]:
    """Examples of one source as they come, before `limit` and `weight`. A damaged row goes to
    `bad`, which counts the conversations that are shortened to begin with the user; without one it
    raises, and conversations stay as they are."""
    source = source.resolved()
    for origin, row in rows_of(source):
        if bad is not None:
            bad.read += 1
        try:
            if isinstance(row, BadRow):
                raise row
            example = parse_row(
                row,
                origin=origin,
                workload=source.workload,
                default_workload=source.default_workload,
                columns=source.columns,
            )
            if bad is not None and _begins_with_assistant(example):
                example = _from_first_user_turn(example)
                bad.shortened += 1
            yield example
        except BadRow as error:
            if bad is None:
                raise
            bad.refuse(error)


def _begins_with_assistant(example: Example) -> bool:
    """True for a part of a longer conversation, as a third of ShareGPT is: nothing prompts its
    first turns."""
    return bool(example.messages) and example.messages[0]["role"] == "assistant"


def _from_first_user_turn(example: Example) -> Example:
    """BadRow if no turn is the user's."""
    for index, message in enumerate(example.messages):
        if message["role"] == "user":
            return replace(example, messages=example.messages[index:])
    raise BadRow(example.origin, "no turn is the user's, so nothing prompts the assistant")
