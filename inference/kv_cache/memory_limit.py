"""A limit of memory for keys and values: who fits, and how large the caches are meanwhile.

A cache is dense: every row of it has as many positions as the longest one needs, so what a batch
takes is rows × positions, whatever the other rows hold. Knows numbers of rows and tokens, no
requests and no order of service."""

from __future__ import annotations

from collections.abc import Sequence

from inference.kv_cache.draft_cache import DraftCache
from inference.kv_cache.ragged_cache import RaggedCache
from inference.requests.request import Request
from speculators.errors import ConfigError

STEP = 64  # positions by which the caches grow, as far as the limit lets them


class KVMemory:
    """At most `limit` bytes for the keys, values and recurrent states of the target and of the
    drafter, all rows and positions that have memory, filled or not. Beside it come weights,
    activations, the features that a head keeps for one round, and for a moment, while the caches
    change their size, one layer's keys or values a second time.

    `slack`: positions that a round may write beyond the committed text. Both caches must hold
    something already: bytes per position are learnt from them. Errors: ConfigError, if not even two
    tokens fit."""

    def __init__(
        self, limit: int, cache: RaggedCache, proposer: DraftCache | None, slack: int
    ) -> None:
        self.limit, self._cache, self._proposer, self._slack = limit, cache, proposer, slack
        self._own = _bytes_per_position(cache)
        # the states that are held, those of a forward, and those of rows that keep a part of it
        self._states = 0 if cache.states is None else 3 * cache.states.bytes_per_row()
        self._other = (
            0 if proposer is None or proposer.cache is None else _bytes_per_position(proposer.cache)
        )
        tokens, too_many = 0, cache.max_len - slack + 1
        while tokens + 1 < too_many:
            middle = (tokens + too_many) // 2
            tokens, too_many = (middle, too_many) if self.fits(1, middle) else (tokens, middle)
        self.most_tokens = tokens  # of one row alone
        if tokens < 2:
            raise ConfigError(
                f"kv_cache_memory_bytes={limit} does not hold two tokens and the drafts of a round,"
                f" which take {self.bytes(1, 2)} bytes; raise it"
            )

    def bytes(self, rows: int, tokens: int) -> int:
        """Bytes of `rows` rows during a round; the longest row has so many tokens."""
        return self._bytes(rows, min(tokens + self._slack, self._cache.max_len))

    def fits(self, rows: int, tokens: int) -> bool:
        return self.bytes(rows, tokens) <= self.limit

    def room_for(self, candidates: Sequence[Request], running: Sequence[Request]) -> int:
        """How many of the candidates, who come in this order, fit beside those who run, and may
        grow for a while."""
        tokens = max((len(request.token_ids) for request in running), default=0)
        end = max((request.end for request in running), default=0)
        for count, request in enumerate(candidates):
            tokens, end = max(tokens, request.num_prefill_tokens + 1), max(end, request.end)
            rows = len(running) + count + 1
            if rows > 1 and not self.fits(rows, min(tokens + STEP, end)):
                return count
        return len(candidates)

    def hold(self, rows: int, tokens: int) -> None:
        """Gives the caches memory for such a batch, which must fit. Rows that are free stay as long
        as they may."""
        cache = self._cache
        needed = min(tokens + self._slack, cache.max_len)
        if rows <= cache.rows and needed <= cache.capacity:
            return
        wanted = min(-(-needed // STEP) * STEP, cache.max_len)
        sizes = [max(wanted, cache.capacity), *range(wanted, needed - 1, -1)]
        capacity = next(size for size in sizes if self._bytes(rows, size) <= self.limit)
        while rows < cache.rows and self._bytes(rows + 1, capacity) <= self.limit:
            rows += 1
        self.resize(rows, capacity)

    def resize(self, rows: int, capacity: int) -> None:
        """Both caches, so that the drafter's holds what the target's may."""
        self._cache.resize(rows, capacity)
        if self._proposer is not None and self._proposer.cache is not None:
            self._proposer.cache.resize(rows, self._other_capacity(capacity))

    def _bytes(self, rows: int, capacity: int) -> int:
        return rows * (
            self._states + capacity * self._own + self._other_capacity(capacity) * self._other
        )

    def _other_capacity(self, capacity: int) -> int:
        if self._proposer is None or self._proposer.cache is None:
            return 0
        return min(self._proposer.cache_length(capacity), self._proposer.cache.max_len)


def _bytes_per_position(cache: RaggedCache) -> int:
    return cache.bytes() // (cache.rows * cache.capacity)
