"""RaggedCache: keys and values of many requests, each row at its own length.

A `transformers` cache assumes that every row of a batch has seen the same number of tokens.
Speculative decoding breaks that: each round commits a different number of tokens per row and throws
the rest away. Here a row is a slot of preallocated memory and an integer; new tokens are written at
each row's own length, rolling back is lowering the integer, and what lies beyond it is masked until
it is overwritten. Every layer keeps every position (sliding-window layers too: the window is a
matter of masks), so key j of a row is always that row's token j. States of recurrent layers, which
have no positions, are rolled back by speculators/target/recurrent.py. Knows no request, drafter or
architecture: shapes and layers are learnt from the first keys and values that arrive."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers.cache_utils import Cache
from typing_extensions import override

from draftsmith.speculators.errors import ConfigError
from draftsmith.speculators.precision import on_device
from draftsmith.speculators.target.recurrent import RecurrentLayers, RecurrentStates

INITIAL_CAPACITY = 256  # positions


class RaggedCache:
    """Keys/values of at most `max_rows` rows, per layer [rows, kv_heads, capacity, head_dim].

    All rows are allocated. Capacity starts at INITIAL_CAPACITY and doubles when a view needs more,
    up to `max_len`. A round may write tokens that are then rolled back, so `max_len` must hold the
    longest sequence plus the drafts of one round. `lengths`: tokens of each row. `states`: those of
    recurrent layers, once a target that has some has run."""

    static = False  # its lengths are numbers of the host

    def __init__(self, max_rows: int, max_len: int, *, device: torch.device | str = "cpu") -> None:
        self.max_rows = max_rows
        self.max_len = max_len
        self.capacity = min(INITIAL_CAPACITY, max_len)
        self.device = torch.device(device)
        self.lengths: list[int] = [0] * max_rows
        self.states: RecurrentStates | None = None
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}  # keys and values
        # the rows that were used last, and of each layer its keys and values of these
        self._rows = (0, 0)
        self._layer_rows: dict[int, tuple[Tensor, Tensor]] = {}
        self._arange = torch.arange(max_len, device=self.device)

    # ------------------------------------------------------------------ what a forward needs

    def view(self, start: int, stop: int, num_new_tokens: int) -> RaggedView:
        """Rows [start, stop) as `past_key_values` of one forward over `num_new_tokens` (T) tokens
        per row, written at each row's own length.

        Lengths move only with `advance`: a row of fewer than T tokens is padded, and advanced by
        its real count."""
        self.reserve(start, stop, num_new_tokens)
        return RaggedView(self, start, stop, num_new_tokens)

    def mask(
        self,
        start: int,
        stop: int,
        num_new_tokens: int,
        position_ids: Tensor | None = None,
    ) -> Tensor | None:
        """bool [b, 1, T, S], True = attend: query i of row b sees its keys 0 … length_b + i. S =
        longest row + T. `position_ids` [b, T]: of these tokens, where they are at hand.

        None where plain causal attention says the same: rows of equal length that either add one
        token or are empty."""
        lengths = self.lengths[start:stop]
        T = num_new_tokens
        longest = max(lengths)
        if (T == 1 or longest == 0) and min(lengths) == longest:
            return None
        if position_ids is None:
            position_ids = self.position_ids(start, stop, T)
        last_visible = position_ids[:, None, :, None]  # [b, 1, T, 1]
        return self._arange[: longest + T] <= last_visible

    def tree_mask(
        self, start: int, stop: int, base: Sequence[int], visible: Tensor
    ) -> tuple[Tensor, Tensor]:
        """For T new tokens per row whose last N positions, from base[b] on, are a tree.

        visible bool [b, T, N]: which of these N, the new ones last, a new token sees (itself
        included) beside the text. Returns mask [b, 1, T, S] as `mask` does, and index [b, S]: which
        of the N a key is, below 0 for the text."""
        T, N = visible.shape[1:]
        longest = max(self.lengths[start:stop]) + T
        first = on_device(base, self.device)[:, None]  # [b, 1]
        index = self._arange[:longest] - first  # [b, S]
        inside = index.clamp(0, N - 1)[:, None].expand(-1, T, -1)  # [b, T, S]
        seen = visible.gather(2, inside) & (index < N)[:, None]
        return (seen | (index < 0)[:, None])[:, None], index

    def position_ids(self, start: int, stop: int, num_new_tokens: int) -> Tensor:
        """[b, T]: each row's own positions, length_b … length_b + T - 1."""
        lengths = self.lengths[start:stop]
        T = num_new_tokens
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
        moved: list[tuple[int, int, int]] = []  # row, from where, to where
        for row, kept in enumerate(places):
            length = self.lengths[row]
            moved += [
                (row, length + old, length + new) for new, old in enumerate(kept) if old != new
            ]
        if moved:
            rows, source, target = on_device(moved, self.device).unbind(1)
            for tensor in self._tensors():
                tensor[rows, :, target] = tensor[rows, :, source]
        self.advance_rows(0, [len(kept) for kept in places])

    def truncate(self, row: int, length: int) -> None:
        """Rolls `row` back to its first `length` tokens; recurrent states cannot be."""
        held = self.lengths[row]
        if not 0 <= length <= held or (self.states is not None and length != held):
            raise ConfigError(
                f"row {row} holds {held} tokens"
                f"{' and the recurrent states after them' if self.states is not None else ''},"
                f" cannot keep {length}",
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
        self.lengths[dst_row] = length
        self.lengths[src_row] = 0
        if self.states is not None:
            self.states.move(src_row, dst_row)

    # ------------------------------------------------------------------ memory

    def memory(self) -> tuple[list[Tensor], list[Tensor]]:
        """Keys and values of every layer [rows, kv_heads, capacity, head_dim]; none before the
        first are written."""
        layers = [self._layers[index] for index in sorted(self._layers)]
        return [keys for keys, _ in layers], [values for _, values in layers]

    def keys_of(self, layer_idx: int, start: int, stop: int) -> Tensor:
        """[b, kv_heads, capacity, head_dim] of rows [start, stop), of which each row's own length
        is meaningful."""
        return self._layers[layer_idx][0][start:stop]

    def bytes(self) -> int:
        """Memory of keys and values held now, in bytes: all layers, all rows, the whole
        capacity."""
        return sum(tensor.nbytes for tensor in self._tensors())

    def reserve(self, start: int, stop: int, num_new_tokens: int) -> None:
        """Makes room for more tokens in rows [start, stop)."""
        self._reserve(max(self.lengths[start:stop]) + num_new_tokens)

    def reserve_all(self) -> None:
        """Gives every row its full length now, for whoever needs memory that stays where it is."""
        self._reserve(self.max_len)

    def layer(self, index: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The layer's memory, allocated in the shape of the first `key`/`value` [b, kv_heads, T,
        head_dim] seen."""
        if index not in self._layers:
            self._layers[index] = (
                self._allocate(key, self.capacity),
                self._allocate(value, self.capacity),
            )
        return self._layers[index]

    def layer_rows(
        self, index: int, start: int, stop: int, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Rows [start, stop) of `layer`. The views of the rows that were used last are kept: making
        them takes as long as writing a token into them."""
        if self._rows != (start, stop):
            self._layer_rows.clear()
            self._rows = (start, stop)
        if index not in self._layer_rows:
            keys, values = self.layer(index, key, value)
            with torch.inference_mode(False):
                self._layer_rows[index] = keys[start:stop], values[start:stop]
        return self._layer_rows[index]

    def _tensors(self) -> list[Tensor]:
        return [tensor for layer in self._layers.values() for tensor in layer]

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
        self._layer_rows.clear()  # which would hold the memory that is left
        # Layer by layer, so that no more than one is held twice. If memory runs out on the way,
        # capacity stays what every layer has, and the next attempt goes on with those left.
        for index, (keys, values) in self._layers.items():
            if keys.shape[2] < capacity:
                self._layers[index] = self._grown(keys, capacity), self._grown(values, capacity)
        self.capacity = capacity

    def _grown(self, memory: Tensor, capacity: int) -> Tensor:
        """A copy of a layer's memory with zeros behind it."""
        grown = self._allocate(memory, capacity)
        grown[:, :, : memory.shape[2]] = memory
        return grown

    def _allocate(self, like: Tensor, capacity: int) -> Tensor:
        """[rows, kv_heads, capacity, head_dim]. Zeros, since a masked NaN would reach the output;
        never an inference tensor, so that the cache may outlive a block of `inference_mode`."""
        shape = (self.max_rows, like.shape[1], capacity, like.shape[3])
        with torch.inference_mode(False):
            return torch.zeros(shape, dtype=like.dtype, device=like.device)


class CacheView(Cache):
    """What transformers asks of a cache beside keys and values. `past`: positions before the
    forward, the longest row's."""

    layer_class_to_replicate = None
    offloading = False
    is_compileable = False
    is_sliding = ()  # type: ignore[assignment]  # no layer drops positions

    def __init__(self, past: int, capacity: int) -> None:
        self.layers: list = []
        self.past = past
        self.capacity = capacity

    @override
    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions before the forward, of every layer: `past`."""
        return self.past

    @override
    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Keys that a mask covers, those of the forward included, and the position of the first."""
        return self.past + query_length, 0


class RaggedView(CacheView):
    """`past_key_values` of one forward over some rows of a RaggedCache. Made by `RaggedCache.view`,
    used once."""

    def __init__(self, cache: RaggedCache, start: int, stop: int, num_new_tokens: int) -> None:
        lengths = cache.lengths[start:stop]
        super().__init__(max(lengths), cache.capacity)
        self.cache = cache
        self._start = start
        self._stop = stop
        self._lengths = lengths
        self._T = num_new_tokens
        self._equal = min(lengths) == self.past
        # (kv_heads, capacity) -> [b·kv_heads·T], which all layers share
        self._flat_index: dict[tuple[int, int], Tensor] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args, **kwargs
    ) -> tuple[Tensor, Tensor]:
        """Writes key/value [b, kv_heads, T, head_dim] at each row's length; returns views [b,
        kv_heads, S, …]."""
        rows = key_states.shape[0]
        T = key_states.shape[2]
        if (rows, T) != (len(self._lengths), self._T):
            raise ConfigError(
                f"made for {len(self._lengths)} rows × {self._T} tokens, not for {rows} × {T}",
                where="RaggedView",
            )
        keys, values = self.cache.layer_rows(
            layer_idx, self._start, self._stop, key_states, value_states
        )
        held_keys = keys.narrow(2, 0, self.past + T)
        held_values = values.narrow(2, 0, self.past + T)
        if self._equal:
            held_keys.narrow(2, self.past, T).copy_(key_states)
            held_values.narrow(2, self.past, T).copy_(value_states)
        else:
            self._scatter(keys, key_states)
            self._scatter(values, value_states)
        return held_keys, held_values

    def _scatter(self, memory: Tensor, new: Tensor) -> None:
        """Writes new [b, h, T, d] into memory [b, h, capacity, d], seen as [b·h·capacity, d]: one
        index copy of [b·h·T, d]."""
        dim = new.shape[-1]
        memory.view(-1, dim).index_copy_(0, self._index(memory), new.reshape(-1, dim))

    def _index(self, memory: Tensor) -> Tensor:
        heads, capacity = memory.shape[1:3]
        if (heads, capacity) not in self._flat_index:
            device = memory.device
            rows = torch.arange(len(self._lengths), device=device)[:, None, None]  # [b, 1, 1]
            head = torch.arange(heads, device=device)[None, :, None]  # [1, h, 1]
            first = on_device(self._lengths, device)[:, None, None]  # [b, 1, 1]
            position = first + torch.arange(self._T, device=device)  # [b, 1, T]
            index = ((rows * heads + head) * capacity + position).reshape(-1)
            self._flat_index[heads, capacity] = index
        return self._flat_index[heads, capacity]

    @contextmanager
    def recurrent(self, layers: RecurrentLayers) -> Iterator[None]:
        """Around the forward of a target with recurrent layers: they work on a copy of the rows'
        states."""
        cache = self.cache
        cache.states = cache.states or RecurrentStates(layers, cache.max_rows)
        with cache.states.forward(
            self._start, self._stop, self._T, fresh=self.past == 0
        ) as self.layers:
            yield
