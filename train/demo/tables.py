"""Questions about a small markdown table; the answer stands in bold."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from .shapes import Exchange, Style, Thread, capital
from .words import CITIES, COLOURS, DAYS, JOBS, PRODUCTS, SURNAMES, names

BOLD = re.compile(r"\*\*(.+?)\*\*")


@dataclass(frozen=True)
class Table:
    """Columns by name; the first one names the rows."""

    columns: dict[str, list[str]]
    noun: str

    @property
    def key(self) -> str:
        return next(iter(self.columns))

    def markdown(self) -> str:
        heads = list(self.columns)
        lines = ["| " + " | ".join(heads) + " |", "|" + " --- |" * len(heads)]
        lines += ["| " + " | ".join(row) + " |" for row in zip(*self.columns.values())]
        return "\n".join(lines)


def _numbers(rng: random.Random, low: int, high: int, count: int) -> list[str]:
    return [str(n) for n in rng.sample(range(low, high), count)]


THEMES = (
    (
        "person",
        "name",
        lambda r, n: names(r, n),
        (
            ("age", lambda r, n: _numbers(r, 18, 70, n)),
            ("city", lambda r, n: r.sample(CITIES, n)),
            ("job", lambda r, n: r.sample(JOBS, n)),
            ("room", lambda r, n: _numbers(r, 1, 40, n)),
        ),
    ),
    (
        "product",
        "product",
        lambda r, n: r.sample(PRODUCTS, n),
        (
            ("price", lambda r, n: _numbers(r, 5, 99, n)),
            ("stock", lambda r, n: _numbers(r, 1, 60, n)),
            ("colour", lambda r, n: r.sample(COLOURS, n)),
        ),
    ),
    (
        "team",
        "team",
        lambda r, n: r.sample(CITIES, n),
        (
            ("rank", lambda r, n: _numbers(r, 1, 30, n)),
            ("score", lambda r, n: _numbers(r, 10, 99, n)),
            ("coach", lambda r, n: r.sample(SURNAMES, n)),
        ),
    ),
    (
        "trip",
        "city",
        lambda r, n: r.sample(CITIES, n),
        (
            ("day", lambda r, n: r.sample(DAYS, n)),
            ("cost", lambda r, n: _numbers(r, 20, 99, n)),
            ("guide", lambda r, n: names(r, n)),
            ("distance", lambda r, n: _numbers(r, 2, 60, n)),
        ),
    ),
)
NUMERIC = {"age", "price", "stock", "rank", "score", "cost", "distance"}

ASKS = (
    "{table}\n\n{question}",
    "Here is a table:\n\n{table}\n\n{question}",
    "Look at this table.\n\n{table}\n\n{question}",
    "{question}\n\n{table}",
    "Use the table to answer.\n\n{table}\n\n{question}",
)
CELL_ASKS = (
    "What is the {col} of {row}?",
    "Which {col} does {row} have?",
    "Tell me the {col} for {row}.",
    "Look up the {col} of {row}.",
)
CELL_SAYS = (
    "The {col} of {row} is **{v}**.",
    "In the row for {row}, the {col} is **{v}**.",
    "For {row}, the {col} is **{v}**.",
    "The table shows {row} with {col} **{v}**.",
)
ROW_ASKS = (
    "Which {noun} has {col} {v}?",
    "Find the {noun} with {col} {v}.",
    "In which row is the {col} {v}?",
    "Who or what has {v} as {col}?",
)
ROW_SAYS = (
    "The {noun} with {col} {v} is **{row}**.",
    "The {col} {v} stands in the row of **{row}**.",
    "{col_up} {v} belongs to **{row}**.",
)
LIST_ASKS = (
    "List all values in the {col} column.",
    "What are the entries under {col}?",
    "Name every {col} in the table.",
)
LIST_SAYS = (
    "The {col} column has: **{v}**.",
    "These are the entries under {col}: **{v}**.",
    "From top to bottom: **{v}**.",
)
MORE_ASKS = (
    "Which has the higher {col}, {row} or {other}?",
    "Compare the {col} of {row} and {other}. Which is higher?",
    "Is the {col} higher for {row} or for {other}?",
)
LESS_ASKS = (
    "Which has the lower {col}, {row} or {other}?",
    "Compare the {col} of {row} and {other}. Which is lower?",
    "Is the {col} lower for {row} or for {other}?",
)
COMPARE_SAYS = (
    "The {col} of {row} is {x} and the {col} of {other} is {y}. {big} is more than {small}, so the {word} one is **{best}**.",
    "{row} has {col} {x}. {other} has {col} {y}. Since {big} is more than {small}, the answer is **{best}**.",
    "{row}: {x}, {other}: {y}. {big} is more than {small}. The {word} {col} belongs to **{best}**.",
)
FOLLOW = ("{question}", "And another one: {question}", "Thanks. {question}", "From the same table: {question}")
CONTEXT = ("I looked at the {col} column. ", "Let me check the table. ", "", "", "There are {n} rows in the table. ")

ROW_READS = ("The row reads: {row}. ", "I found this row: {row}. ", "The row we need is {row}. ")


def _table(rng: random.Random) -> Table:
    noun, key, keys, others = rng.choice(THEMES)
    rows = rng.randint(3, 6)
    columns = {key: keys(rng, rows)}
    for head, values in rng.sample(others, rng.randint(1, 3)):
        columns[head] = values(rng, rows)
    return Table(columns, noun)


def _compare(rng: random.Random, table: Table, col: str) -> tuple[str, str, str]:
    i, j = rng.sample(range(len(table.columns[col])), 2)
    row, other = table.columns[table.key][i], table.columns[table.key][j]
    x, y = table.columns[col][i], table.columns[col][j]
    higher = rng.random() < 0.5
    first = (int(x) > int(y)) == higher
    big, small = (x, y) if int(x) > int(y) else (y, x)
    best = row if first else other
    said = rng.choice(COMPARE_SAYS).format(
        col=col, row=row, other=other, x=x, y=y, big=big, small=small, best=best, word="higher" if higher else "lower"
    )
    return rng.choice(MORE_ASKS if higher else LESS_ASKS).format(col=col, row=row, other=other), said, best


def _question(rng: random.Random, table: Table) -> tuple[str, str, str, str, int | None]:
    """A question, its answer, the bold part, the column asked about and the row, if one."""
    col = rng.choice(list(table.columns)[1:])
    kind = rng.choice(
        ("cell", "cell", "row", "list", "compare", "compare")
        if col in NUMERIC
        else ("cell", "cell", "row", "row", "list")
    )
    if kind == "compare":
        return *_compare(rng, table, col), col, None
    at = rng.randrange(len(table.columns[col]))
    row, value = table.columns[table.key][at], table.columns[col][at]
    if kind == "list":
        col = rng.choice(list(table.columns))
        value = ", ".join(table.columns[col])
    slots = {"col": col, "col_up": capital(col), "row": row, "v": value, "noun": table.noun}
    asks, says = {"cell": (CELL_ASKS, CELL_SAYS), "row": (ROW_ASKS, ROW_SAYS), "list": (LIST_ASKS, LIST_SAYS)}[kind]
    bold = row if kind == "row" else value
    return rng.choice(asks).format(**slots), rng.choice(says).format(**slots), bold, col, None if kind == "list" else at


def _exchange(rng: random.Random, table: Table, form: str, style: Style) -> Exchange:
    question, said, bold, col, at = _question(rng, table)
    context = rng.choice(CONTEXT).format(col=col, n=len(table.columns[table.key]))
    if at is not None and rng.random() < 0.5:
        context = rng.choice(ROW_READS).format(row=", ".join(values[at] for values in table.columns.values()))
    if style.cheerful:
        context = "Happy to help! "
    elif style.steps:
        context = f"I looked at the {col} column. "
    user = form.format(table=table.markdown(), question=question)
    return Exchange(user, ("" if style.brief else context) + said, bold)


def start(rng: random.Random, style: Style) -> Thread:
    """A table with a question, and follow-ups about the same table."""
    table = _table(rng)
    return _exchange(rng, table, rng.choice(ASKS), style), lambda: _exchange(rng, table, rng.choice(FOLLOW), style)


def is_right(expected: str, answer: str) -> bool:
    """Is the last bold part the expected one?"""
    found = BOLD.findall(answer)
    return bool(found) and found[-1] == expected
