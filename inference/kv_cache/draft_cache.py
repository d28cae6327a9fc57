"""The drafter's cache as prefix reuse and the memory limit see it: rows to copy and to size, no
drafting."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from inference.kv_cache.ragged_cache import RaggedCache


class DraftCache(Protocol):
    """The part of a `Proposer` that is about its rows; its methods say there what they do."""

    @property
    def cache(self) -> RaggedCache | None: ...

    def cache_length(self, positions: int) -> int: ...

    def reset(self, row: int) -> None: ...

    def copy_prefix(self, src_row: int, dst_row: int, prefix: Sequence[int]) -> int: ...
