"""Steps at a few fixed shapes: what batches are padded to, and a ragged cache as such a step sees
it.

A step reads nothing from the host but numbers in tensors: each row's length is one of them, keys
beyond it are masked, and new keys are written by index into memory that stays where it is. So one
recording of a step serves every round that fits its shape. Knows no model and does not compile."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache

FEWEST_KEYS = 256


class Shape(NamedTuple):
    """The shape of one step: rows, new tokens per row, keys that are read."""

    rows: int
    width: int
    keys: int


class Buckets:
    """Which shapes there are. Rows: doubling up to `max_rows`. Widths: 1 and `width`. Keys:
    doubling up to `capacity`."""

    def __init__(self, max_rows: int, width: int, capacity: int) -> None:
        self.rows = doubling(1, max_rows)
        self.widths = (1, width) if width > 1 else (1,)
        self.keys = doubling(FEWEST_KEYS, capacity)

    def __iter__(self) -> Iterator[Shape]:
        for keys in self.keys:
            for rows in self.rows:
                for width in self.widths:
                    yield Shape(rows, width, keys)

    def shape(self, rows: int, width: int, longest: int) -> Shape:
        """For so many rows of at most `longest` tokens, to which `width` are added."""
        width = min(size for size in self.widths if size >= width)
        rows = min(size for size in self.rows if size >= rows)
        return Shape(rows, width, min(size for size in self.keys if size >= longest + width))


def doubling(first: int, most: int) -> tuple[int, ...]:
    """first, 2·first, 4·first, … as far as they are below `most`, and `most`."""
    sizes = []
    while first < most:
        sizes.append(first)
        first *= 2
    return (*sizes, most)


class StaticRows(Cache):
    """The first R rows of a ragged cache inside a step of fixed shape: its `past_key_values`, and
    for a drafter what RaggedCache is, as far as a step asks.

    lengths       [R] long, of each row before the step
    keys, values  per layer the whole memory [rows, kv_heads, capacity, head_dim]
    """

    static = True
    layer_class_to_replicate = None
    offloading = False
    is_compileable = True
    is_sliding = ()  # type: ignore[assignment]  # no layer drops positions

    def __init__(
        self, lengths: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], shape: Shape
    ) -> None:
        self.layers: list = []
        self.lengths, self.shape, self.memory = lengths, shape, (keys, values)
        self.capacity = keys[0].shape[2]
        arange = torch.arange(max(shape), device=lengths.device)
        self._positions = lengths[:, None] + arange[: shape.width]  # [R, T]
        self._mask = arange[: shape.keys] <= self._positions[:, None, :, None]  # [R, 1, T, S]
        self._rows = arange[: shape.rows, None, None]

    def position_ids(self, *_: int) -> Tensor:
        """[R, T]"""
        return self._positions

    def mask(self, *_: int) -> Tensor:
        """bool [R, 1, T, S], True = attend."""
        return self._mask

    def view(self, *_: int) -> StaticRows:
        return self

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args, **kwargs
    ) -> tuple[Tensor, Tensor]:
        """Both [R, kv_heads, T, head_dim], written at each row's length -> [R, kv_heads, S,
        head_dim]."""
        written = []
        for memory, new in zip(self.memory, (key_states, value_states), strict=True):
            heads = torch.arange(new.shape[1], device=new.device)[None, :, None]
            memory[layer_idx].index_put_((self._rows, heads, self._positions[:, None]), new)
            written.append(memory[layer_idx][: self.shape.rows, :, : self.shape.keys])
        return written[0], written[1]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.shape.keys - self.shape.width

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.shape.keys, 0
