"""docs/acceptance-json.md, written from the report's own models so that it cannot drift from them.

`python -m inference.report.docs docs/acceptance-json.md` writes it; a test holds the file to this text.
"""

from __future__ import annotations

import re
import sys
import types
import typing
from pathlib import Path

from inference.report.cell import Record
from inference.report.schema import SCHEMA_VERSION, SUMMARY_KEYS, AcceptanceReport

SUMMARY_ROWS = "\n".join(f"| `{key}` | {meaning} |" for key, meaning in SUMMARY_KEYS.items())
INTRODUCTION = f"""# acceptance.json

The acceptance report as data, layout {SCHEMA_VERSION}. `report.html` and the terminal's table show the same
numbers. Load it with `inference.report.schema.load_report(path)`, which checks that every cell's rates follow from
its counters. Fields are only added within one major version; what was not measured is null, or absent from
`summary`.

Acceptance length (τ) is the number of tokens committed per verification, bonus token included:
1 + accepted ÷ rounds. Token 0 of an output comes from prefill and belongs to no round.

## Keys of `summary`

All of them speak of `provenance.drafter_method` over all workloads. Gates name these keys.

| key | meaning |
| --- | --- |
{SUMMARY_ROWS}

## The cost model

V(n) is the time of one target forward over n tokens per row, lm_head included; D(K) the time of the whole
draft phase. Both are measured alone, at the batch size and context length the cell names. Then

    limit_speedup = acceptance_length · V(1) / (V(K+1) + D(K))
    efficiency    = speedup_vs_autoregressive / limit_speedup

The limit leaves out sampling, scheduling, committing, prefill, rounds cut short by the end of a text, and
rows that wait for others: efficiency is what they cost. They slow the run without drafting too, so it may
exceed 1. The `all` cell weighs V(1) by committed tokens and the others by rounds, which makes its limit the
ratio of the summed times.

## Fields
"""


def acceptance_markdown() -> str:
    """The whole page: one table of fields per model, in the order in which the report nests them."""
    parts = [INTRODUCTION]
    for model in _models(AcceptanceReport):
        rows = [
            f"| `{name}` | {_type(field.annotation)} | {field.description} |"
            for name, field in model.model_fields.items()
        ]
        head = [f"### {_heading(model)}", "", " ".join((model.__doc__ or "").split()), ""]
        parts.append("\n".join([*head, "| field | type | meaning |", "| --- | --- | --- |", *rows]) + "\n")
    return "\n".join(parts)


def _heading(model: type[Record]) -> str:
    return "The file" if model is AcceptanceReport else model.__name__


def _models(model: type[Record], seen: list[type[Record]] | None = None) -> list[type[Record]]:
    """The model and every model its fields hold, each once, outer before inner."""
    seen = [] if seen is None else seen
    if model not in seen:
        seen.append(model)
        for field in model.model_fields.values():
            for inner in _leaves(field.annotation):
                if isinstance(inner, type) and issubclass(inner, Record):
                    _models(inner, seen)
    return seen


def _leaves(annotation: typing.Any) -> list[typing.Any]:
    arguments = typing.get_args(annotation)
    return [leaf for argument in arguments for leaf in _leaves(argument)] if arguments else [annotation]


def _type(annotation: typing.Any) -> str:
    """A field's type in JSON's words, models linked to their tables."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_type(argument) for argument in arguments)
    if origin is list:
        return f"list of {_type(arguments[0])}"
    if origin is dict:
        return f"object of {_type(arguments[1])}"
    if origin is typing.Literal:
        return " or ".join(f'`"{value}"`' for value in arguments)
    if isinstance(annotation, type) and issubclass(annotation, Record):
        return f"[{annotation.__name__}](#{re.sub(r'[^a-z]', '', annotation.__name__.lower())})"
    words = {
        str: "string",
        int: "integer",
        float: "number",
        bool: "boolean",
        type(None): "null",
        typing.Any: "any",
    }
    return words[annotation]


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(acceptance_markdown(), encoding="utf-8")
