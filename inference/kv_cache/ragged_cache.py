"""RaggedCache: keys and values of many requests, each row at its own length.

A `transformers` cache assumes that every row of a batch has seen the same number of tokens.
Speculative decoding breaks that: each round commits a different number of tokens per row and throws
the rest away. Here a row is a slot of preallocated memory and an integer; new tokens are written at
each row's own length, rolling back is lowering the integer, and what lies beyond it is masked until
it is overwritten. Every layer keeps every position (sliding-window layers too: the window is a
matter of masks), so key j of a row is always that row's token j. States of recurrent layers, which
have no positions, are rolled back by speculators/target/recurrent.py.

This module knows nothing of requests, drafters, verification, or any architecture: head counts,
head sizes, dtype and the number of layers are learnt from the first keys and values that arrive.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from draftsmith.speculators.errors import ConfigError
from draftsmith.speculators.precision import on_device
from draftsmith.speculators.target.recurrent import RecurrentLayers, RecurrentStates


class RaggedCache:
    """Keys/values of at most `max_rows` rows, per layer [rows, kv_heads, capacity, head_dim].

    All rows are allocated. Capacity starts at `initial_capacity` positions and doubles when a view
    needs more, up to `max_len`. A round may write tokens that are then rolled back, so `max_len`
    must hold the longest sequence plus the drafts of one round."""

    static = False  # its lengths are numbers of the host

    def __init__(
        self,
        max_rows: int,
        max_len: int,
        *,
        initial_capacity: int = 256,
        device: torch.device | str = "cpu",
    ) -> None:
        if max_rows < 1 or max_len < 1:
            raise ConfigError(
                f"max_rows={max_rows} and max_len={max_len} must both be at least 1",
                where="RaggedCache",
            )
        self.max_rows, self.max_len = max_rows, max_len
        self.capacity = max(1, min(initial_capacity, max_len))
        self.device = torch.device(device)
        self.lengths: list[int] = [0] * max_rows
        self.states: RecurrentStates | None = (
            None  # of recurrent layers, once a target that has some has run
        )
        self._keys: list[Tensor | None] = []
        self._values: list[Tensor | None] = []
        self._row_views: dict[
            tuple[int, int, int], tuple[Tensor, Tensor]
        ] = {}  # (layer, start, stop) -> keys, values
        self._arange = torch.arange(self.capacity, device=self.device)  # [capacity]

    # ------------------------------------------------------------------ what a forward needs

    def view(self, start: int, stop: int, num_new_tokens: int) -> RaggedView:
        """Rows [start, stop) as `past_key_values` of one forward over `num_new_tokens` (T) tokens
        per row.

        The forward writes T tokens at each row's own length; the lengths themselves move only with
        `advance`, so a row that has fewer than T real tokens is padded and advanced by its real
        count."""
        if not 0 <= start < stop <= self.max_rows:
            raise ConfigError(
                f"rows [{start}, {stop}) are not within the {self.max_rows} rows",
                where="RaggedCache.view",
            )
        if num_new_tokens < 1:
            raise ConfigError(
                f"num_new_tokens={num_new_tokens}, expected at least 1", where="RaggedCache.view"
            )
        self.reserve(start, stop, num_new_tokens)
        return RaggedView(self, start, stop, num_new_tokens)

    def reserve(self, start: int, stop: int, num_new_tokens: int) -> None:
        """Makes room for more tokens in rows [start, stop), for a head that keeps their number but
        no keys."""
        self._reserve(max(self.lengths[start:stop]) + num_new_tokens)

    def mask(self, start: int, stop: int, num_new_tokens: int) -> Tensor | None:
        """bool [b, 1, T, S], True = attend: query i of row b sees its keys 0 … length_b + i. S =
        longest row + T.

        None where plain causal attention says the same: rows of equal length that either add one
        token or are empty."""
        lengths, T = self.lengths[start:stop], num_new_tokens
        longest = max(lengths)
        if (T == 1 or longest == 0) and min(lengths) == longest:
            return None
        self._reserve(longest + T)
        last_visible = self.position_ids(start, stop, T)[:, None, :, None]  # [b, 1, T, 1]
        return self._arange[: longest + T] <= last_visible

    def tree_mask(
        self, start: int, stop: int, base: Sequence[int], visible: Tensor
    ) -> tuple[Tensor, Tensor]:
        """For T new tokens per row whose last N positions, counted from base[b] on, are no text but
        a tree.

        visible bool [b, T, N]: which of these N, the new ones last, each new token sees (itself
        included) beside the row's first base[b] positions. Returns mask [b, 1, T, S] as `mask`
        does, and index [b, S] that says which of the N each key is: below 0 for the text."""
        T, N = visible.shape[1:]
        longest = max(self.lengths[start:stop]) + T
        self._reserve(longest)
        first = on_device(base, self.device)[:, None]  # [b, 1]
        index = self._arange[:longest] - first  # [b, S]
        inside = index.clamp(0, N - 1)[:, None].expand(-1, T, -1)  # [b, T, S]
        seen = visible.gather(2, inside) & (index < N)[:, None]
        return (seen | (index < 0)[:, None])[:, None], index

    def position_ids(self, start: int, stop: int, num_new_tokens: int) -> Tensor:
        """[b, T]: each row's own positions, length_b … length_b + T - 1."""
        lengths, T = self.lengths[start:stop], num_new_tokens
        self.reserve(start, stop, T)
        if len(lengths) == 1:
            return self._arange[lengths[0] : lengths[0] + T][None]
        return on_device(lengths, self.device)[:, None] + self._arange[:T]

    # ------------------------------------------------------------------ what a round decides

    def advance(self, row: int, count: int) -> None:
        """Keeps the first `count` of the tokens last written to `row`."""
        self.advance_rows(row, [count])

    def advance_rows(self, start: int, counts: Sequence[int]) -> None:
        """Keeps the first counts[i] of the tokens last written to row start + i. Recurrent states
        follow."""
        for row, count in enumerate(counts, start):
            if count < 0 or self.lengths[row] + count > self.capacity:
                where = f"row {row} of {self.lengths[row]} tokens and {self.capacity} positions"
                raise ConfigError(f"{where} cannot advance by {count}", where="RaggedCache")
            self.lengths[row] += count
        if self.states is not None:
            self.states.keep(start, counts)

    def keep(self, places: Sequence[Sequence[int]]) -> None:
        """Keeps the tokens at places[row] (ascending) of those written to rows 0, 1, … behind their
        lengths, closed up; each row grows by their number."""
        moved = [
            (row, self.lengths[row] + place, self.lengths[row] + to)
            for row, kept in enumerate(places)
            for to, place in enumerate(kept)
            if place != to
        ]
        if moved and self.states is not None:
            raise ConfigError(
                "recurrent states follow a chain of tokens, not the branches of a tree",
                where="RaggedCache.keep",
            )
        if moved:
            rows, source, target = on_device(moved, self.device).unbind(1)
            for tensor in self._tensors():
                tensor[rows, :, target] = tensor[rows, :, source]
        self.advance_rows(0, [len(kept) for kept in places])

    def truncate(self, row: int, length: int) -> None:
        """Rolls `row` back to its first `length` tokens."""
        if not 0 <= length <= self.lengths[row]:
            raise ConfigError(
                f"row {row} holds {self.lengths[row]} tokens, cannot keep {length}",
                where="RaggedCache.truncate",
            )
        if self.states is not None and length != self.lengths[row]:
            raise ConfigError(
                f"row {row} has the recurrent states after"
                f" {self.lengths[row]} tokens, not those after {length}",
                where="RaggedCache.truncate",
            )
        self.lengths[row] = length

    def reset(self, row: int) -> None:
        """Empties `row` for another request."""
        self.lengths[row] = 0
        if self.states is not None:
            self.states.reset(row)

    def move(self, src_row: int, dst_row: int) -> None:
        """The text of `src_row` goes on in `dst_row` (to keep the rows in use contiguous)."""
        length = self.lengths[src_row]
        for tensor in self._tensors():
            tensor[dst_row, :, :length] = tensor[src_row, :, :length]
        self.lengths[dst_row], self.lengths[src_row] = length, 0
        if self.states is not None:
            self.states.move(src_row, dst_row)

    def bytes(self) -> int:
        """Memory of keys and values held now, in bytes: all layers, all rows, the whole
        capacity."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._tensors())

    def memory(self) -> tuple[list[Tensor], list[Tensor]]:
        """Keys and values of every layer [rows, kv_heads, capacity, head_dim]; none before the
        first are written."""
        keys = [tensor for tensor in self._keys if tensor is not None]
        return keys, [tensor for tensor in self._values if tensor is not None]

    def keys_of(self, layer_idx: int, start: int, stop: int) -> Tensor:
        """[b, kv_heads, capacity, head_dim] of rows [start, stop), of which each row's own length
        is meaningful."""
        keys = self._keys[layer_idx]
        assert keys is not None, f"nothing was written to layer {layer_idx}"
        return keys[start:stop]

    # ------------------------------------------------------------------ memory

    def reserve_all(self) -> None:
        """Gives every row its full length now, for whoever needs memory that stays where it is."""
        self._reserve(self.max_len)

    def _tensors(self) -> list[Tensor]:
        keys, values = self.memory()
        return [*keys, *values]

    def _reserve(self, length: int) -> None:
        if length <= self.capacity:
            return
        if length > self.max_len:
            raise ConfigError(
                f"{length} positions are needed; expected at most max_len={self.max_len}",
                where="RaggedCache",
            )
        capacity = self.capacity
        while capacity < length:
            capacity = min(2 * capacity, self.max_len)
        self.capacity = capacity
        used = max(self.lengths)
        self._row_views.clear()
        for tensors in (self._keys, self._values):
            for i, old in enumerate(tensors):
                if old is not None:
                    new = tensors[i] = self._allocate(old)
                    new[:, :, :used] = old[:, :, :used]
        with torch.inference_mode(False):
            self._arange = torch.arange(capacity, device=self.device)

    def _allocate(self, like: Tensor) -> Tensor:
        """[rows, kv_heads, capacity, head_dim] of zeros. Zeros, since a masked NaN would still
        reach the output; and never an inference tensor, so that the cache may outlive the
        `inference_mode` block that filled it."""
        shape = (self.max_rows, like.shape[1], self.capacity, like.shape[3])
        with torch.inference_mode(False):
            return torch.zeros(shape, dtype=like.dtype, device=like.device)

    def _layer(self, layer_idx: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The layer's buffers, allocated in the shape of the first `key`/`value` [b, kv_heads, T,
        head_dim] seen."""
        while len(self._keys) <= layer_idx:
            self._keys.append(None)
            self._values.append(None)
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        if keys is None or values is None:
            keys = self._keys[layer_idx] = self._allocate(key)
            values = self._values[layer_idx] = self._allocate(value)
        return keys, values

    def _layer_rows(
        self, layer_idx: int, start: int, stop: int, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Rows [start, stop) of the layer's buffers; the views are kept, since making them costs as
        much as a write."""
        views = self._row_views.get((layer_idx, start, stop))
        if views is None:
            keys, values = self._layer(layer_idx, key, value)
            with torch.inference_mode(False):
                views = self._row_views[layer_idx, start, stop] = (
                    keys[start:stop],
                    values[start:stop],
                )
        return views


class RaggedView(Cache):
    """`past_key_values` of one forward over some rows of a RaggedCache. Made by `RaggedCache.view`,
    used once."""

    layer_class_to_replicate = None
    offloading = False
    is_compileable = False
    is_sliding = ()  # type: ignore[assignment]  # no layer drops positions

    def __init__(self, cache: RaggedCache, start: int, stop: int, num_new_tokens: int) -> None:
        lengths = cache.lengths[start:stop]
        self.layers: list = []
        self.cache, self._start, self._stop = cache, start, stop
        self._lengths, self._past, self._T = lengths, max(lengths), num_new_tokens
        self._end = self._past + num_new_tokens  # S
        self.capacity = cache.capacity
        self._equal = min(lengths) == self._past
        self._flat_index: dict[
            tuple[int, int], Tensor
        ] = {}  # (kv_heads, capacity) -> [b·kv_heads·T], all layers share

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args, **kwargs
    ) -> tuple[Tensor, Tensor]:
        """Writes key/value [b, kv_heads, T, head_dim] at each row's length; returns views [b,
        kv_heads, S, …]."""
        if key_states.shape[2] != self._T or key_states.shape[0] != len(self._lengths):
            brought = f"{key_states.shape[0]} × {key_states.shape[2]}"
            raise ConfigError(
                f"made for {len(self._lengths)} rows × {self._T} tokens, not for {brought}",
                where="RaggedView",
            )
        keys, values = self.cache._layer_rows(
            layer_idx, self._start, self._stop, key_states, value_states
        )
        seen_keys, seen_values = (
            keys.narrow(2, 0, self._end),
            values.narrow(2, 0, self._end),
        )  # [b, h, S, d]
        if self._equal:
            seen_keys.narrow(2, self._past, self._T).copy_(key_states)
            seen_values.narrow(2, self._past, self._T).copy_(value_states)
        else:
            keys, values = self.cache._layer(layer_idx, key_states, value_states)
            self._scatter(keys, key_states)
            self._scatter(values, value_states)
        return seen_keys, seen_values

    def _scatter(self, buffer: Tensor, states: Tensor) -> None:
        """buffer [rows, h, capacity, d], seen as [rows·h·capacity, d]: one index copy of [b·h·T,
        d]."""
        heads, capacity, dim = buffer.shape[1:]
        index = self._flat_index.get((heads, capacity))
        if index is None:
            device = buffer.device
            rows = torch.arange(self._start, self._stop, device=device)[:, None, None]  # [b, 1, 1]
            head = torch.arange(heads, device=device)[None, :, None]  # [1, h, 1]
            first = on_device(self._lengths, device)[:, None, None]  # [b, 1, 1]
            position = first + torch.arange(self._T, device=device)  # [b, 1, T]
            index = ((rows * heads + head) * capacity + position).reshape(-1)
            self._flat_index[heads, capacity] = index
        buffer.view(-1, dim).index_copy_(0, index, states.reshape(-1, dim))

    @contextmanager
    def recurrent(self, layers: RecurrentLayers) -> Iterator[None]:
        """Around the forward of a target with recurrent layers: they work on a copy of the rows'
        states."""
        cache = self.cache
        cache.states = cache.states or RecurrentStates(layers, cache.max_rows)
        with cache.states.forward(
            self._start, self._stop, self._T, fresh=self._past == 0
        ) as self.layers:
            yield

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Length of the longest row before this forward."""
        return self._past

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self._past + query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return self.cache.max_len
