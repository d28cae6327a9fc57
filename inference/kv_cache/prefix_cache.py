"""Prefix reuse: a request whose text begins as that of another row takes over what was computed for
it.

Keys and values of a position depend on the tokens up to it and on nothing else, so where two texts
begin alike, so do their rows. A row keeps its text when its request has finished, until another
request overwrites it. Knows which text lies in which row, and moves what a drafter keeps for it
along; it decides nothing about who runs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from inference.kv_cache.draft_cache import DraftCache
from inference.kv_cache.ragged_cache import RaggedCache
from inference.requests.request import Request

WORTH_COPYING = (
    16  # tokens; fewer are computed again: a copy, or a forward of one's own, would cost more
)


class PrefixReuse:
    """The texts in the rows of `cache`. `enabled=False`: none is remembered, and nothing is
    reused."""

    def __init__(self, cache: RaggedCache, enabled: bool = True) -> None:
        self._cache, self.enabled = cache, enabled
        self._clock = itertools.count(1)
        self.forget()

    def forget(self) -> None:
        """No row is a source any more, those in use included: their drafter may not have seen what
        they hold."""
        self._texts: list[list[int]] = [[] for _ in range(self._cache.max_rows)]
        self._used = [0] * self._cache.max_rows  # when a row was last written or read

    def text(self, row: int) -> list[int]:
        """The tokens whose keys and values the row holds."""
        return self._texts[row][: self._cache.lengths[row]]

    def swap(self, row: int, other: int) -> None:
        """Two rows change places; the cache has done so already, or will."""
        texts, used = self._texts, self._used
        texts[row], texts[other] = texts[other], texts[row]
        used[row], used[other] = used[other], used[row]

    def best(self, request: Request) -> tuple[int, int]:
        """(row, tokens): the row that shares most of what the request must prefill, (-1, 0) without
        one worth it."""
        found, longest = -1, 0
        if self._may_reuse(request):
            wanted = request.token_ids[: request.num_prefill_tokens]
            for row in range(self._cache.rows):
                if begin_alike(wanted, self._texts[row]):
                    shared = common_prefix(wanted, self.text(row))
                    if shared > longest:
                        found, longest = row, shared
        return (found, longest) if longest >= WORTH_COPYING else (-1, 0)

    def wave(self, requests: Sequence[Request]) -> list[Request]:
        """Those to prefill now, the longest first. Who shares more with one of them than with any
        row waits for it."""
        chosen: list[Request] = []
        left: list[int] = []  # tokens each has left to prefill, as far as tokens tell
        for request in requests:
            source, held = self.best(request)
            if held:
                self._used[source] = next(self._clock)  # not to be overwritten by the others
            if not self._may_reuse(request) or all(
                not begin_alike(request.token_ids, other.token_ids)
                or common_prefix(request.token_ids, other.token_ids) < held + WORTH_COPYING
                for other in chosen
            ):
                chosen.append(request)
                left.append(request.num_prefill_tokens - held)
        order = sorted(range(len(chosen)), key=lambda i: -left[i])
        return [chosen[i] for i in order]

    def _may_reuse(self, request: Request) -> bool:
        """Asked before every other row is looked at, which takes a while where there are
        hundreds."""
        return self.enabled and request.may_reuse and len(request.token_ids) >= WORTH_COPYING

    def enter(self, request: Request, row: int, proposer: DraftCache | None) -> int:
        """The request takes `row`, the first free one: returns how many of its tokens need no
        prefill."""
        source, shared = self.best(request)
        self._spare(row, source, shared, proposer)
        reused = 0
        if source >= 0:
            prefix = request.token_ids[:shared]
            kept = shared if proposer is None else proposer.copy_prefix(source, row, prefix)
            reused = min(
                kept, request.num_prefill_tokens - 1
            )  # one position must be computed: its features are wanted
            self._used[source] = 0 if shared == len(self.text(source)) else next(self._clock)
            self._cache.copy_prefix(source, row, reused)
        else:
            self._cache.reset(row)
            if proposer is not None:
                proposer.reset(row)
        self._texts[row] = request.token_ids if self.enabled else []
        self._used[row] = next(self._clock)
        return reused

    def leave(self, row: int) -> None:
        """The request of the row is done with it; its text may serve others."""
        self._used[row] = next(self._clock)

    def _spare(self, row: int, source: int, shared: int, proposer: DraftCache | None) -> None:
        """Saves the text in `row` in the free row that was not used for longest, if that is another
        one."""
        text = self.text(row)
        if len(text) < WORTH_COPYING or (source == row and len(text) - shared < WORTH_COPYING):
            return
        others = [free for free in range(row + 1, self._cache.rows) if free != source]
        if not others:
            return
        victim = min(
            others, key=lambda free: (len(self.text(free)) >= WORTH_COPYING, self._used[free])
        )
        if len(self.text(victim)) >= WORTH_COPYING and self._used[victim] > self._used[row]:
            return  # `row` itself is the one to lose
        if proposer is not None:
            proposer.copy_prefix(row, victim, text)
        self._cache.copy_prefix(row, victim, len(text))
        self._texts[victim], self._used[victim] = text, self._used[row]


def begin_alike(one: Sequence[int], other: Sequence[int]) -> bool:
    """True if two texts may share a prefix worth copying. A cheap test that rules out most
    pairs."""
    last = WORTH_COPYING - 1
    return len(one) > last and len(other) > last and one[0] == other[0] and one[last] == other[last]


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """The number of tokens that both begin with. By halves: comparing slices is what lists are fast
    at."""
    same, differ = (
        0,
        min(len(one), len(other)) + 1,
    )  # one[:same] == other[:same]; not so for `differ`
    while same + 1 < differ:
        middle = (same + differ) // 2
        if one[same:middle] == other[same:middle]:
            same = middle
        else:
            differ = middle
    return same
