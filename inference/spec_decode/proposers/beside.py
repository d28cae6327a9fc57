"""A trained head, and beside it a proposer that needs no model: n-grams or suffixes.

The other one is asked first, since its drafts take next to no time; the plan then says for which
rows the head is asked (gated_plan.py). Where it is not, the features of the kept positions wait for
it, and it reads them before it drafts the next time: its keys and values are the same as if it had
been asked in every round. It drafts for all rows in one forward, so that a row is never cheaper
alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from typing_extensions import override

from draftsmith.inference.requests.request import Request
from draftsmith.inference.spec_decode.proposal import Proposal
from draftsmith.inference.spec_decode.proposers.base import Proposer
from draftsmith.inference.spec_decode.proposers.head import HeadProposer
from draftsmith.inference.spec_decode.round_plan import RoundPlan


class HeadBesideProposer(HeadProposer):
    """Chains of a head, and of `beside`, whose drafts are deterministic chains with a confidence.
    `names`: of the head's method and of the other's, in counters. `head`: as of HeadProposer."""

    def __init__(
        self, beside: Proposer, names: tuple[str, str], *head: Any, **options: Any
    ) -> None:
        super().__init__(*head, **options)
        self._beside = beside
        self._names = names

    @override
    def propose(self, requests: Sequence[Request], plan: RoundPlan) -> Proposal:
        """Each row takes drafts of one of them, as the plan divides; `methods` says of which."""
        beside = self._beside.propose(requests, plan)
        taken, asked = plan.divide(beside)
        proposal = merged(super().propose(requests, RoundPlan(asked)), beside, taken)
        proposal.methods = [self._names[count > 0] for count in taken]
        return proposal

    @override
    def reset(self, row: int) -> None:
        super().reset(row)
        self._beside.reset(row)

    @override
    def move(self, src_row: int, dst_row: int) -> None:
        super().move(src_row, dst_row)
        self._beside.move(src_row, dst_row)


def merged(head: Proposal, beside: Proposal, taken: Sequence[int]) -> Proposal:
    """The first taken[b] drafts of `beside` in the rows where that is not 0, the head's elsewhere.
    q of a draft beside is one-hot; none, if the head's drafts are deterministic too."""
    if not any(taken):
        return head
    width = max(*head.counts, *taken)
    token_ids = _of_width(head.token_ids, width)
    q = None if head.q is None else _of_width(head.q, width)
    for row, count in enumerate(taken):
        if not count:
            continue
        drafts = beside.token_ids[row, :count]
        token_ids[row, :count] = drafts
        if q is not None:
            q[row, :count] = torch.nn.functional.one_hot(drafts, q.shape[-1])
    counts = [ahead or behind for ahead, behind in zip(taken, head.counts, strict=True)]
    return Proposal(token_ids, counts, q)


def _of_width(drafts: torch.Tensor, width: int) -> torch.Tensor:
    """A copy of the first `width` drafts [B, K, …], with zeros behind them if there are fewer."""
    padded = drafts.new_zeros(drafts.shape[0], width, *drafts.shape[2:])
    common = min(width, drafts.shape[1])
    padded[:, :common] = drafts[:, :common]
    return padded
