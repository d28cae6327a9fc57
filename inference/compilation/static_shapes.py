"""Steps at a few fixed shapes: what batches are padded to, and a ragged cache as such a step sees
it.

A step reads nothing from the host but numbers in tensors: each row's length is one of them, keys
beyond it are masked, and new keys are written by index into memory that stays where it is. So one
recording of a step serves every round that fits its shape. Knows no model and does not compile."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.cache_utils import Cache

FEWEST_KEYS = 256


def at_least(sizes: Sequence[int], needed: int) -> int:
    """The smallest of ascending sizes that holds `needed`, which the last one does."""
    return next(size for size in sizes if size >= needed)


def doubling(first: int, most: int) -> tuple[int, ...]:
    """first, 2·first, 4·first, … as far as they are below `most`, and `most`."""
    sizes = []
    while first < most:
        sizes.append(first)
        first *= 2
    return (*sizes, most)


@dataclass(frozen=True)
class Shape:
    """The shape of one step: rows, new tokens per row, keys that are read."""

    rows: int
    width: int
    keys: int


class Buckets:
    """Which shapes there are. Rows: `row_sizes` up to `max_rows`, which is always one of them, or
    powers of two. Widths: 1 and `width`. Keys: doubling up to `capacity`."""

    def __init__(
        self, max_rows: int, width: int, capacity: int, row_sizes: Sequence[int] | None = None
    ) -> None:
        if row_sizes is None:
            self.rows = doubling(1, max_rows)
        else:
            self.rows = (*(size for size in row_sizes if size < max_rows), max_rows)
        self.widths = (1, width) if width > 1 else (1,)
        self.keys = doubling(FEWEST_KEYS, capacity)

    @property
    def most(self) -> int:
        """How many shapes there are."""
        return len(self.rows) * len(self.widths) * len(self.keys)

    @property
    def shapes(self) -> Iterator[Shape]:
        """All of them, the smallest first."""
        for keys in self.keys:
            for rows in self.rows:
                for width in self.widths:
                    yield Shape(rows, width, keys)

    def shape(self, rows: int, width: int, longest: int) -> Shape:
        """For so many rows of at most `longest` tokens, to which `width` are added."""
        width = at_least(self.widths, width)
        return Shape(at_least(self.rows, rows), width, at_least(self.keys, longest + width))


def padded(x: Tensor, rows: int, width: int | None = None) -> Tensor:
    """x [b, …] -> [rows, …], or [b, T, …] -> [rows, width, …], filled up with zeros, and dense:
    strides count too."""
    shape = (rows, *x.shape[1:]) if width is None else (rows, width, *x.shape[2:])
    if x.shape == shape:
        return x.flatten().view(shape)
    full = x.new_zeros(shape)
    (full[: x.shape[0]] if width is None else full[: x.shape[0], : x.shape[1]]).copy_(x)
    return full


class StaticRows:
    """The first R rows of a ragged cache inside a step of fixed shape: for a drafter what
    RaggedCache is, as far as a step asks.

    lengths       [R] long, of each row before the step
    keys, values  per layer the whole memory [rows, kv_heads, capacity, head_dim]
    """

    static = True

    def __init__(
        self, lengths: Tensor, keys: list[Tensor], values: list[Tensor], shape: Shape
    ) -> None:
        self.shape, self._keys, self._values = shape, keys, values
        self.capacity = keys[0].shape[2]
        device = lengths.device
        self._positions = lengths[:, None] + torch.arange(shape.width, device=device)  # [R, T]
        self._mask = (
            torch.arange(shape.keys, device=device) <= self._positions[:, None, :, None]
        )  # [R, 1, T, S]
        self._rows = torch.arange(shape.rows, device=device)[:, None, None]

    def position_ids(self, *_: int) -> Tensor:
        """[R, T]"""
        return self._positions

    def mask(self, *_: int) -> Tensor:
        """bool [R, 1, T, S], True = attend."""
        return self._mask

    def view(self, *_: int) -> StaticView:
        return StaticView(self)

    def write(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """key, value [R, kv_heads, T, head_dim], at each row's length -> [R, kv_heads, S, head_dim]
        of both."""
        found = []
        for memory, new in ((self._keys[layer], key), (self._values[layer], value)):
            heads = torch.arange(memory.shape[1], device=memory.device)[None, :, None]
            memory.index_put_((self._rows, heads, self._positions[:, None]), new)
            found.append(memory[: self.shape.rows, :, : self.shape.keys])
        return found[0], found[1]


class StaticView(Cache):
    """`past_key_values` of one step."""

    layer_class_to_replicate = None
    offloading = False
    is_compileable = True
    is_sliding: tuple[bool, ...] = ()  # no layer drops positions

    def __init__(self, rows: StaticRows) -> None:
        self.layers: list = []
        self._rows, self.capacity = rows, rows.capacity

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args, **kwargs
    ) -> tuple[Tensor, Tensor]:
        return self._rows.write(layer_idx, key_states, value_states)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._rows.shape.keys - self._rows.shape.width

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self._rows.shape.keys, 0
