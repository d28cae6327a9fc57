"""Proposer: what the engine asks for drafts. A proposer knows no verification rule and commits nothing.

Its state is kept per row, in the engine's rows: `reset` or `copy_prefix` when a request enters a row, `move` when rows
are compacted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from inference.kv_cache.ragged_cache import RaggedCache
from inference.metrics import SpecDecodeCounters
from inference.requests.request import Request
from inference.spec_decode.proposal import Proposal

# How sure the proposer is of the next draft of each row, in (0, 1), before it is drawn -> how many more drafts are
# wanted, this one included. 0: not even this one.
GoOn = Callable[[Sequence[float]], int]


class Proposer:
    """`num_speculative_tokens`: the most it drafts per row and round. `num_scaffold_tokens`: the most places per row
    that a proposal has besides its drafts. `reads_features`: whether the engine must call `prefill` and `observe`;
    features are taps [b, T, n·H] (None without taps) and last_hidden [b, T, H]. `reads_logits`: whether it must call
    `see_logits`.
    `counters`: what became of its drafts since it was made, kept by the engine.
    `go_on`: set by whoever chooses lengths. A proposer that `asks` calls it before each depth is drawn: one that
    drafts one depth after the other, where asking needs no waiting for a device. Others tell `Proposal.confidence`."""

    reads_features: bool = False
    reads_logits: bool = False
    num_scaffold_tokens: int = 0
    asks: bool = False
    go_on: GoOn | None = None

    def __init__(self, num_speculative_tokens: int) -> None:
        self.num_speculative_tokens = num_speculative_tokens
        self.counters = SpecDecodeCounters()

    @property
    def max_places(self) -> int:
        """Of its longest proposal, scaffold included."""
        return self.num_speculative_tokens + self.num_scaffold_tokens

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> Proposal:
        """Drafts for rows 0..B-1, what follows each request's token_ids: at most limits[b] tokens for row b.

        A limit of 0 is a row that is not drafted for in this round, and may be in a later one. A row's drafts and its
        use of its generator must not depend on the other rows, but for what `go_on` answers.
        """
        raise NotImplementedError

    def prefill(
        self,
        first_row: int,
        requests: Sequence[Request],
        counts: Sequence[int],
        taps: Tensor | None,
        last_hidden: Tensor,
    ) -> None:
        """Features of the next counts[i] prompt positions of row first_row + i; what lies beyond is padding."""

    def observe(
        self, requests: Sequence[Request], counts: Sequence[int], taps: Tensor | None, last_hidden: Tensor
    ) -> None:
        """After a round, for rows 0..B-1: features of the counts[b] positions kept, whose next tokens are committed."""

    def count(self, request: Request, num_drafted: int, num_accepted: int, depth: int) -> None:
        """What became of the request's drafts of this round; `depth` as in the counters."""
        self.counters.add(num_drafted, num_accepted, depth)

    def see_logits(self, requests: Sequence[Request], proposal: Proposal, logits: Tensor) -> None:
        """Of the target [B, 1+K, V] over its own proposal, before anything is judged: entry 0 after the committed text,
        entry 1+k after place k, scaffold included."""

    def rehearse(self, requests: Sequence[Request], depth: int) -> bool:
        """Drafts `depth` tokens for every row and forgets them, for their time to be taken; False: it takes none."""
        return False

    def reset(self, row: int) -> None:
        """A new request enters the row."""

    def move(self, src_row: int, dst_row: int) -> None:
        """The request of `src_row` goes on in `dst_row`."""

    def copy_prefix(self, src_row: int, dst_row: int, prefix: Sequence[int]) -> int:
        """Instead of `reset`: the text of `dst_row` begins with `prefix`, as does that of `src_row` (the same row, or
        another; its request may have finished). Returns for how many positions it needs no features any more."""
        self.reset(dst_row)
        return 0 if self.reads_features else len(prefix)

    @property
    def cache(self) -> RaggedCache | None:
        """Keys and values of its own, which count towards a limit of memory; None without any."""
        return None

    def cache_length(self, positions: int) -> int:
        """Positions of `cache` that a row may need while the target's cache has room for so many."""
        return positions
