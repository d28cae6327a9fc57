"""The few shapes that the rounds of a compiled engine are padded to."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

FEWEST_KEYS = 256


class Shape(NamedTuple):
    """The shape of one step: rows, new tokens per row, keys that are read."""

    rows: int
    width: int
    keys: int


def all_shapes(max_rows: int, width: int, capacity: int) -> list[Shape]:
    """The smallest first. Rows: doubling up to `max_rows`. Widths: 1 and `width`. Keys: doubling up
    to `capacity`."""
    rows = doubling(1, max_rows)
    keys = doubling(FEWEST_KEYS, capacity)
    return [Shape(*sizes) for sizes in product(rows, sorted({1, width}), keys)]


def doubling(first: int, most: int) -> list[int]:
    """first, 2·first, 4·first, … as far as they are below `most`, and `most`."""
    sizes = []
    while first < most:
        sizes.append(first)
        first *= 2
    return [*sizes, most]


def shape_for(shapes: Sequence[Shape], rows: int, width: int, longest: int) -> Shape:
    """The smallest for so many rows of at most `longest` tokens, to which `width` are added."""
    return next(
        shape
        for shape in shapes
        if shape.rows >= rows and shape.width >= width and shape.keys >= longest + shape.width
    )
