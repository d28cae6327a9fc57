"""Several drafters at once, each for its share of the requests: an A/B on live traffic.

Every drafter is fed every row, so that any row could be anyone's and rows move and are reused as
ever; a row is drafted for by the one its request belongs to. That costs the keys and values of all
of them, and the drafting of rows that are another's. Chains only."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from inference.kv_cache.ragged_cache import RaggedCache
from inference.requests.request import Request
from inference.spec_decode.proposal import Proposal
from inference.spec_decode.proposers.base import Proposer
from speculators.precision import on_device


@dataclass
class Arm:
    """`proposer`: None drafts nothing. `share`: in proportion to the others'. `columns`: its taps
    among all that are read, [n·H] numbers; None: all of them."""

    name: str
    proposer: Proposer | None
    share: float = 1.0
    columns: Tensor | None = None


class SplitProposer(Proposer):
    """At least one arm drafts. Which arm a request belongs to is a function of its id and of the
    shares."""

    def __init__(self, arms: Sequence[Arm], vocab_size: int) -> None:
        self.arms, self._vocab_size = list(arms), vocab_size
        self._drafting = [arm for arm in self.arms if arm.proposer is not None]
        self._proposers = [arm.proposer for arm in self.arms if arm.proposer is not None]
        super().__init__(max(each.num_speculative_tokens for each in self._proposers))
        self.reads_features = any(each.reads_features for each in self._proposers)

    def arm(self, request: Request) -> Arm:
        digest = hashlib.blake2b(request.request_id.encode(), digest_size=8).digest()
        place = int.from_bytes(digest, "big") / 2**64 * sum(arm.share for arm in self.arms)
        for arm in self.arms:
            place -= arm.share
            if place < 0:
                return arm
        return self.arms[-1]

    def count(self, request: Request, num_drafted: int, num_accepted: int, depth: int) -> None:
        proposer = self.arm(request).proposer
        if proposer is not None:
            proposer.count(request, num_drafted, num_accepted, depth)

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> Proposal:
        owners = [self.arm(request) for request in requests]
        proposals = [
            proposer.propose(
                requests, [limit if owner is arm else 0 for owner, limit in zip(owners, limits)]
            )
            for arm, proposer in zip(self._drafting, self._proposers)
        ]
        widest = max(proposals, key=lambda each: each.width)
        if not widest.width:
            return widest
        token_ids, counts = torch.zeros_like(widest.token_ids), [0] * len(requests)
        q = None
        if (
            sampled := next((each.q for each in proposals if each.q is not None), None)
        ) is not None:
            q = sampled.new_zeros(len(requests), widest.width, self._vocab_size)
        for arm, proposal in zip(self._drafting, proposals):
            width = proposal.width
            own = [row for row, owner in enumerate(owners) if owner is arm and proposal.counts[row]]
            if not own:
                continue
            rows = on_device(own, token_ids.device)
            token_ids[rows, :width] = drafts = proposal.token_ids[rows]
            for row in own:
                counts[row] = proposal.counts[row]
            if q is not None and proposal.q is not None:
                q[rows, :width] = proposal.q[rows]
            elif q is not None:  # what was not drawn is drawn with certainty
                q[rows, :width] = nn.functional.one_hot(drafts, self._vocab_size).to(q)
        return Proposal(token_ids, counts, q)

    def prefill(
        self,
        start: int,
        requests: Sequence[Request],
        counts: Sequence[int],
        taps: Tensor | None,
        last_hidden: Tensor,
    ) -> None:
        for arm, proposer in zip(self._drafting, self._proposers):
            if proposer.reads_features:
                proposer.prefill(start, requests, counts, _own(arm, taps), last_hidden)

    def observe(
        self,
        requests: Sequence[Request],
        counts: Sequence[int],
        taps: Tensor | None,
        last_hidden: Tensor,
    ) -> None:
        for arm, proposer in zip(self._drafting, self._proposers):
            if proposer.reads_features:
                proposer.observe(requests, counts, _own(arm, taps), last_hidden)

    def reset(self, row: int) -> None:
        for proposer in self._proposers:
            proposer.reset(row)

    def move(self, src_row: int, dst_row: int) -> None:
        for proposer in self._proposers:
            proposer.move(src_row, dst_row)

    def copy_prefix(self, src_row: int, dst_row: int, prefix: Sequence[int]) -> int:
        """All of them go on from where the one that knows least does: they are fed the same
        features."""
        kept = [proposer.copy_prefix(src_row, dst_row, prefix) for proposer in self._proposers]
        least = min(kept)
        for proposer, positions in zip(self._proposers, kept):
            shorter = prefix
            while proposer.reads_features and positions > least:
                shorter = shorter[: len(shorter) - (positions - least)]
                positions = proposer.copy_prefix(src_row, dst_row, shorter)
        return least

    @property
    def caches(self) -> list[RaggedCache]:
        return [proposer.cache for proposer in self._proposers if proposer.cache is not None]

    @property
    def cache(self) -> RaggedCache | None:
        """The cache of the only proposer that has one. The memory limit handles no more than one
        (see `caches`)."""
        return self.caches[0] if len(self.caches) == 1 else None

    def cache_length(self, positions: int) -> int:
        return max(
            proposer.cache_length(positions)
            for proposer in self._proposers
            if proposer.cache is not None
        )


def _own(arm: Arm, taps: Tensor | None) -> Tensor | None:
    return taps if taps is None or arm.columns is None else taps[..., arm.columns]
