"""Which slots the queries of a head see in training: those of chains, and those of draft blocks.

Queries stand in blocks of `width`. A query sees slots of its row (the context), and keys of its
block, which lie outside the row. Computes no scores."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from draftsmith.speculators.precision import on_host, to_device


def in_window(places: Tensor, keys: Tensor, window: int) -> Tensor:
    """What a sliding window is, in training and drafting: bool [..., Q, S] of positions `places`
    [..., Q], `keys` [S], True where a key is ahead or less than `window` behind."""
    return places[..., None] - keys < window


def first_slots(segment_ids: Tensor) -> Tensor:
    """[B, T] in the host's memory: the slot that each slot's document (in one piece) begins at."""
    segments = on_host(segment_ids)
    slots = torch.arange(segments.shape[1]).expand_as(segments)
    begins = segments.diff(dim=1, prepend=segments[:, :1]) != 0
    return (slots * begins).cummax(1).values


@dataclass(frozen=True, eq=False)
class PackedQueries:
    """Queries of packed rows. Each sees the slots of its own document up to its own; one of padding
    sees its own only.

    segment_ids  [B, T] documents of the slots; -1: padding
    chosen       [B, M] the slots that have a query; None: every one, in order
    window       a query sees only slots that are `in_window`; None: all
    """

    segment_ids: Tensor
    chosen: Tensor | None = None
    window: int | None = None
    width = 1
    # A block is one query, which sees all keys of its block.
    hidden_in_block = torch.tensor(False)

    def within(self, window: int | None) -> PackedQueries:
        """The same queries with a window: one object per window, which layers share."""
        if window is None:
            return self
        if window not in self._windowed:
            self._windowed[window] = replace(self, window=window)
        return self._windowed[window]

    @cached_property
    def _windowed(self) -> dict[int, PackedQueries]:
        return {}

    @cached_property
    def slots(self) -> Tensor:
        """[B, M]."""
        if self.chosen is not None:
            return self.chosen
        slots = torch.arange(self.segment_ids.shape[1]).repeat(self.segment_ids.shape[0], 1)
        return to_device(slots, self.segment_ids.device)

    @cached_property
    def _first(self) -> Tensor:
        """[B, M] the first slot that each query may see."""
        slots = on_host(self.slots)
        first = first_slots(self.segment_ids).gather(1, slots)
        return first if self.window is None else first.maximum(slots - self.window + 1)

    def span(self, row: int, queries: slice) -> slice:
        """Slots outside of which these queries of a row see none. Waits for no device."""
        last = on_host(self.slots)[row, queries].max()
        return slice(int(self._first[row, queries].min()), int(last) + 1)

    def hidden(self, row: int, queries: slice, keys: slice) -> Tensor:
        """bool [c, S], True where a query of a row does not see a slot."""
        slots = self.slots[row, queries, None]
        segments = self.segment_ids[row]
        documents = segments[slots]
        key_slots = torch.arange(len(segments), device=slots.device)[keys]
        hidden = (documents != segments[keys]) | (documents < 0) | (slots < key_slots)
        if self.window is not None:
            hidden |= ~in_window(slots[:, 0], key_slots, self.window)
        return hidden & (slots != key_slots)  # no query is left without a key


@dataclass(frozen=True, eq=False)
class Blocks:
    """Draft blocks of a batch of rows. Every slot of a block is a query, and a key of its block.

    last_context  [B, A] the newest context slot of each block, the one before its anchor; -1: no
                  context
    places        [B, A, Q] rotary positions of the slots of each block
    context_places, segment_ids [B, T] positions and documents of the row; another document is not
    seen
    causal        slot j sees slots 0..j of its block; otherwise all of them
    window        a slot sees those that are `in_window`; None: all
    """

    last_context: Tensor
    places: Tensor
    context_places: Tensor
    segment_ids: Tensor
    causal: bool
    window: int | None

    @property
    def width(self) -> int:
        """Q, the queries of a row."""
        return self.places.shape[-1]

    @cached_property
    def _first(self) -> Tensor:
        """[B, A] the first slot of each block's document."""
        return first_slots(self.segment_ids).gather(1, on_host(self.last_context).clamp_min(0))

    def span(self, row: int, queries: slice) -> slice:
        """As `PackedQueries.span`."""
        blocks = slice(queries.start // self.width, queries.stop // self.width)
        last = on_host(self.last_context)[row, blocks]
        first = self._first[row, blocks].masked_fill(last < 0, self.segment_ids.shape[1] - 1)
        return slice(int(first.min()), max(int(last.max()), int(first.min())) + 1)

    def hidden(self, row: int, queries: slice, keys: slice) -> Tensor:
        """As `PackedQueries.hidden`."""
        Q = self.width
        segments = self.segment_ids[row]
        blocks = slice(queries.start // Q, queries.stop // Q)
        last = self.last_context[row, blocks, None]
        slots = torch.arange(len(segments), device=last.device)[keys]
        hidden = ((slots > last) | (segments[last.clamp_min(0)] != segments[keys]))[:, None]
        if self.window is not None:
            context = self.context_places[row, keys]
            hidden = hidden | ~in_window(self.places[row, blocks], context, self.window)
        return hidden.expand(-1, Q, -1).flatten(0, 1)

    @property
    def hidden_in_block(self) -> Tensor:
        """bool [width, width], True where a query does not see a key of its block."""
        every = torch.ones(self.width, self.width, dtype=torch.bool, device=self.places.device)
        hidden = every.triu(1) if self.causal else torch.zeros_like(every)
        return hidden if self.window is None else hidden | every.tril(-self.window)


Queries = PackedQueries | Blocks
