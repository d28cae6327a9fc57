"""The first rows of a ragged cache inside a step of fixed shape.

Lengths are numbers in a tensor, keys beyond them are masked, and new keys are written by index into
memory that stays where it is: one recording of the step serves every round that fits its shape."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftsmith.inference.kv_cache.ragged_cache import CacheView


class StaticRows(CacheView):
    """R rows to which T tokens are added, of which S keys are read: the step's `past_key_values`,
    and for a drafter what RaggedCache is, as far as a step asks.

    lengths  [R] long, of each row before the step
    keys, values  per layer the whole memory [rows, kv_heads, capacity, head_dim]
    """

    static = True
    is_compileable = True

    def __init__(
        self, lengths: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], T: int, S: int
    ) -> None:
        super().__init__(past=S - T, capacity=keys[0].shape[2])
        self.lengths = lengths
        self.keys = keys
        self.values = values
        self.S = S
        self.num_rows = lengths.shape[0]
        arange = torch.arange(S, device=lengths.device)
        self._positions = lengths[:, None] + arange[:T]  # [R, T]
        self._mask = arange <= self._positions[:, None, :, None]  # [R, 1, T, S]
        self._rows = torch.arange(self.num_rows, device=lengths.device)[:, None, None]

    def position_ids(self, *_: int) -> Tensor:
        """[R, T]"""
        return self._positions

    def mask(self, *_: object) -> Tensor:
        """bool [R, 1, T, S], True = attend."""
        return self._mask

    def tree_mask(
        self, start: int, stop: int, base: Tensor, visible: Tensor
    ) -> tuple[Tensor, Tensor]:
        """As RaggedCache's, for trees that begin with the new tokens: visible bool [R, T, T]. A
        token sees itself in any case, since padding that sees nothing would give NaN."""
        T = visible.shape[1]
        visible = visible | torch.eye(T, dtype=torch.bool, device=visible.device)
        index = torch.arange(self.S, device=visible.device) - base[:, None]  # [R, S]
        inside = index.clamp(0, T - 1)[:, None].expand(-1, T, -1)  # [R, T, S]
        seen = visible.gather(2, inside) & (index < T)[:, None]
        return (seen | (index < 0)[:, None])[:, None], index

    def view(self, *_: int) -> StaticRows:
        """Itself: its rows and slots are those of every call."""
        return self

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args, **kwargs
    ) -> tuple[Tensor, Tensor]:
        """Both [R, kv_heads, T, head_dim], written at each row's length -> [R, kv_heads, S,
        head_dim]."""
        heads = torch.arange(key_states.shape[1], device=key_states.device)[None, :, None]
        place = (self._rows, heads, self._positions[:, None])
        keys = self.keys[layer_idx]
        values = self.values[layer_idx]
        keys.index_put_(place, key_states)
        values.index_put_(place, value_states)
        return keys[: self.num_rows, :, : self.S], values[: self.num_rows, :, : self.S]
