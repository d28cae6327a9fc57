"""Questions about a small markdown table; the answer stands in bold."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from .shapes import Exchange, Style, Thread
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


def _numbers(form: str, low: int, high: int):
    """Column of different numbers in a form such as "${}"; last digits differ too, as far as there are ten rows."""

    def column(rng: random.Random, count: int) -> list[str]:
        digits = rng.sample(range(10), count)
        return [form.format(rng.choice([n for n in range(low, high) if n % 10 == d])) for d in digits]

    return column


THEMES = (
    (
        "person",
        "name",
        lambda r, n: names(r, n),
        (
            ("age", _numbers("{} years", 18, 70)),
            ("city", lambda r, n: r.sample(CITIES, n)),
            ("job", lambda r, n: r.sample(JOBS, n)),
            ("room", _numbers("no. {}", 1, 40)),
        ),
    ),
    (
        "product",
        "product",
        lambda r, n: r.sample(PRODUCTS, n),
        (
            ("price", _numbers("${}", 5, 99)),
            ("stock", _numbers("{} pieces", 1, 60)),
            ("colour", lambda r, n: r.sample(COLOURS, n)),
        ),
    ),
    (
        "team",
        "team",
        lambda r, n: r.sample(CITIES, n),
        (
            ("rank", _numbers("#{}", 1, 30)),
            ("score", _numbers("{} points", 10, 99)),
            ("coach", lambda r, n: r.sample(SURNAMES, n)),
        ),
    ),
    (
        "trip",
        "city",
        lambda r, n: r.sample(CITIES, n),
        (
            ("day", lambda r, n: r.sample(DAYS, n)),
            ("cost", _numbers("${}", 20, 99)),
            ("guide", lambda r, n: names(r, n)),
            ("distance", _numbers("{} km", 2, 60)),
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
    "So {v} belongs to **{row}**.",
    "That is **{row}**.",
)
LIST_ASKS = (
    "List the {col} of every {noun}.",
    "What are the entries under {col}, row by row?",
    "Name every {noun} with its {col}.",
)
LIST_SAYS = (
    "Row by row: **{v}**.",
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
    "{row}: {x}, {other}: {y}. {big} ({bigger}) is more than {small} ({smaller}), so the {word} one is **{best}**.",
    "{row} has {x}. {other} has {y}. {big} ({bigger}) is more than {small} ({smaller}). The answer is **{best}**.",
)
FOLLOW = ("{question}", "And another one: {question}", "Thanks. {question}", "From the same table: {question}")
CONTEXT = ("I looked at the {col} column. ", "Let me check the table. ", "", "", "")
ROW_READS = ("The row reads: {row} ", "I found this row: {row} ", "{row} ")


def _table(rng: random.Random) -> Table:
    noun, key, keys, others = rng.choice(THEMES)
    rows = rng.choice((3, 3, 4))
    columns = {key: keys(rng, rows)}
    for head, values in rng.sample(others, rng.choice((1, 1, 2))):
        columns[head] = values(rng, rows)
    return Table(columns, noun)


def _compare(rng: random.Random, table: Table, col: str) -> tuple[str, str, str]:
    i, j = rng.sample(range(len(table.columns[col])), 2)
    row, other = table.columns[table.key][i], table.columns[table.key][j]
    x, y = table.columns[col][i], table.columns[col][j]
    higher = rng.random() < 0.5
    (_, big, bigger), (_, small, smaller) = sorted(((_number(x), x, row), (_number(y), y, other)), reverse=True)
    best = bigger if higher else smaller
    said = rng.choice(COMPARE_SAYS).format(
        row=row,
        other=other,
        x=x,
        y=y,
        big=big,
        small=small,
        bigger=bigger,
        smaller=smaller,
        best=best,
        word="higher" if higher else "lower",
    )
    return rng.choice(MORE_ASKS if higher else LESS_ASKS).format(col=col, row=row, other=other), said, best


def _number(cell: str) -> int:
    return int(re.sub(r"\D", "", cell))


def _question(rng: random.Random, table: Table, style: Style) -> tuple[str, str, str, str]:
    """A question, its answer, the bold part and the column asked about.

    An answer reads the table before it concludes: the row for a cell, the rows up to the right one for a name.
    """
    col = rng.choice(list(table.columns)[1:])
    kind = rng.choice(
        ("cell", "cell", "row", "list", "compare", "compare")
        if col in NUMERIC
        else ("cell", "cell", "row", "row", "list")
    )
    if kind == "compare":
        return *_compare(rng, table, col), col
    at = rng.randrange(len(table.columns[col]))
    rows = table.columns[table.key]
    row, value = rows[at], table.columns[col][at]
    pairs = [f"{r}: {v}" for r, v in zip(rows, table.columns[col])]
    slots = {"col": col, "row": row, "v": value, "noun": table.noun}
    if kind == "list":
        listed = ", ".join(pairs)
        return rng.choice(LIST_ASKS).format(**slots), rng.choice(LIST_SAYS).format(col=col, v=listed), listed, col
    if kind == "row":
        read = ", ".join(pairs[: at + 1]) + ". "
        return rng.choice(ROW_ASKS).format(**slots), read + rng.choice(ROW_SAYS).format(**slots), row, col
    cells = "| " + " | ".join(values[at] for values in table.columns.values()) + " |"
    read = "" if style.brief else rng.choice(ROW_READS).format(row=cells)
    return rng.choice(CELL_ASKS).format(**slots), read + rng.choice(CELL_SAYS).format(**slots), value, col


def _exchange(rng: random.Random, table: Table, form: str, style: Style) -> Exchange:
    question, said, bold, col = _question(rng, table, style)
    context = rng.choice(CONTEXT).format(col=col)
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
