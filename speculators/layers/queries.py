"""Which slots the queries of a head see in training: those of chains, and those of draft blocks.

Queries stand in blocks of `width`. Each sees slots of its row (the context), and keys of its own
block, which lie outside the row. Knows no kernel and computes no scores."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from draftsmith.speculators.precision import on_host, to_device

MASKED_QUERIES = 256  # of one call of a kernel with a mask


class Run(NamedTuple):
    """Queries of one document, in their order, and the slots that they see some of. `causal`: the
    queries are those of the key slots."""

    row: int
    queries: slice
    keys: slice
    causal: bool


class Queries(Protocol):
    """What attention.py asks of queries [B, M]."""

    @property
    def width(self) -> int:
        """Queries of a block."""
        ...

    @property
    def runs(self) -> list[Run]:
        """All queries that see a slot."""
        ...

    @property
    def alone(self) -> Tensor | None:
        """bool [B, 1, M], True for queries that see no slot; None: there are none."""
        ...

    def span(self, queries: slice) -> slice:
        """Slots outside of which these queries see none."""
        ...

    def hidden(self, queries: slice, keys: slice, rows: slice = slice(None)) -> Tensor:
        """bool [B, c, S], True where a query does not see a slot."""
        ...

    @property
    def own_hidden(self) -> Tensor | None:
        """bool [width, width], True where a query does not see a key of its block; None: it sees
        all."""
        ...


def in_window(places: Tensor, keys: Tensor, window: int) -> Tensor:
    """What a sliding window is, in training and drafting: bool [..., Q, S] of positions `places`
    [..., Q], `keys` [S], True where a key is ahead or less than `window` behind."""
    return places[..., None] - keys < window


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
    alone = own_hidden = None

    def within(self, window: int | None) -> PackedQueries:
        """The same queries with a window."""
        return self if window is None else replace(self, window=window)

    @cached_property
    def slots(self) -> Tensor:
        """[B, M]."""
        if self.chosen is not None:
            return self.chosen
        slots = torch.arange(self.segment_ids.shape[1]).expand(self.segment_ids.shape)
        return to_device(slots, self.segment_ids.device)

    def span(self, queries: slice) -> slice:
        if self.chosen is not None:
            return slice(0, self.segment_ids.shape[1])
        first = 0 if self.window is None else max(0, queries.start - self.window + 1)
        return slice(first, queries.stop)

    def hidden(self, queries: slice, keys: slice, rows: slice = slice(None)) -> Tensor:
        slots, segment_ids = self.slots[rows, queries], self.segment_ids[rows]
        own = segment_ids.gather(1, slots)[:, :, None]
        places = torch.arange(segment_ids.shape[1], device=slots.device)[keys]
        hidden = (own != segment_ids[:, None, keys]) | (own < 0) | (slots[:, :, None] < places)
        if self.window is not None:
            hidden |= ~in_window(slots, places, self.window)
        return hidden & (slots[:, :, None] != places)  # nobody is left without a key

    @cached_property
    def runs(self) -> list[Run]:
        rows = zip(on_host(self.segment_ids).tolist(), on_host(self.slots).tolist())
        return [run for row, each in enumerate(rows) for run in self._runs_of(row, *each)]

    def _runs_of(self, row: int, segments: list[int], slots: list[int]) -> Iterator[Run]:
        """What a run sees in part has at most MASKED_QUERIES queries."""
        first: dict[int, int] = {}  # slot of each document
        for slot, segment in enumerate(segments):
            first.setdefault(segment, slot)
        start = 0
        for stop in range(1, len(slots) + 1):
            last, segment = slots[stop - 1], segments[slots[start]]
            if stop < len(slots) and slots[stop] > last and segments[slots[stop]] == segment:
                continue
            whole = segment >= 0 and slots[start] == first[segment] == last - (stop - 1 - start)
            if whole and (self.window is None or stop - start <= self.window):
                yield Run(row, slice(start, stop), slice(first[segment], last + 1), True)
            else:
                for a in range(start, stop, MASKED_QUERIES):
                    b = min(a + MASKED_QUERIES, stop)
                    oldest = first[segment] if segment >= 0 else slots[a]
                    if self.window is not None:
                        oldest = max(oldest, slots[a] - self.window + 1)
                    yield Run(row, slice(a, b), slice(oldest, slots[b - 1] + 1), False)
            start = stop


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
        return self.places.shape[-1]

    def span(self, queries: slice) -> slice:
        return slice(0, self.segment_ids.shape[1])

    def hidden(self, queries: slice, keys: slice, rows: slice = slice(None)) -> Tensor:
        Q = self.width
        blocks = slice(queries.start // Q, queries.stop // Q)
        last, segment_ids = self.last_context[rows, blocks, None], self.segment_ids[rows]
        slots = torch.arange(segment_ids.shape[1], device=last.device)[keys]
        own = segment_ids.gather(1, last[..., 0].clamp_min(0))[..., None]
        hidden = ((slots > last) | (own != segment_ids[:, None, keys]))[:, :, None]
        if self.window is not None:
            places, context = self.places[rows, blocks], self.context_places[rows, None, None, keys]
            hidden = hidden | ~in_window(places, context, self.window)
        return hidden.expand(-1, -1, Q, -1).flatten(1, 2)

    @property
    def own_hidden(self) -> Tensor:
        every = torch.ones(self.width, self.width, dtype=torch.bool, device=self.places.device)
        hidden = every.triu(1) if self.causal else torch.zeros_like(every)
        return hidden if self.window is None else hidden | every.tril(-self.window)

    @cached_property
    def alone(self) -> Tensor:
        hidden = (self.last_context < 0)[..., None].expand(self.places.shape)
        if self.window is not None:
            newest = self.context_places.gather(1, self.last_context.clamp_min(0))[..., None]
            hidden = hidden | (self.places - newest >= self.window)
        return hidden.flatten(1)[:, None]

    @cached_property
    def runs(self) -> list[Run]:
        """MASKED_QUERIES slots of one document at most."""
        found, Q = [], self.width
        most = max(1, MASKED_QUERIES // Q)
        rows = (self.last_context, self.segment_ids, self.places[..., 0], self.context_places)
        for row, (last, segments, places, context) in enumerate(zip(*map(on_host, rows))):
            newest, documents = last.tolist(), segments[last.clamp_min(0)].tolist()
            start = 0
            for stop in range(1, len(newest) + 1):
                same = stop < len(newest) and documents[stop] == documents[start]
                if same and newest[stop] >= 0 and stop - start < most:
                    continue
                if newest[start] >= 0:
                    seen = segments == documents[start]
                    if self.window is not None:
                        seen &= in_window(places[start:stop].min(), context, self.window)
                    oldest = min(int(seen.int().argmax()), min(newest[start:stop]))
                    keys = slice(oldest, max(newest[start:stop]) + 1)
                    found.append(Run(row, slice(start * Q, stop * Q), keys, False))
                start = stop
        return found
