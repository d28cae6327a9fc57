"""GatedPlan: which rows of a round a trained head drafts for, where a proposer that takes no time
drafts beside it.

The proposer beside the head is asked first, and by what it has drafted the plan chooses what a
round of B rows does:

    no head    verifies w drafts per row of the proposer beside it, w ≥ 0
               commits B + Σ_b E_b(w), costs V(w + 1)
    head       each row verifies what is expected to gain more: the draft beside, or the head's
               commits B + Σ_b max(E_b, Ē_b), costs V(k + 1) + D(k), k the most a row may have

    E_b(w) = Σ_{j≤w} S_bj   S_bj: the product of the first j confidences, each times κ, which is
                            what was right of all such drafts over what their confidences promised
    Ē_b                     the same of the head, by its moving means of each depth

V and D are those of costs.py. The time that a choice takes is weighed at the rate ρ, the tokens per
time of plain decoding or of the head for every row, whichever is more: the choice with the largest
surplus, tokens − ρ·time, is made (Dinkelbach 1967; round_plan.py). For one row that is: the draft
beside where (1 + E)/V(w + 1) > ρ, else whichever has the rate ρ.

The means of the head come from rounds that asked it, so that they say what it is worth where the
other has nothing; in every 32nd round at least it is asked, lest they are of another text. What the
other would have been worth is known from every round: its draft is held against the tokens that
were committed.

**No look-ahead.** The choice depends on the committed text, of which the draft beside the head is a
function, and on earlier rounds; never on a token that the head draws. So each row is judged by the
q of whichever drafted for it, as if there were no other."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul

from typing_extensions import override

from draftsmith.inference.spec_decode.acceptance import Acceptance
from draftsmith.inference.spec_decode.costs import RoundCosts
from draftsmith.inference.spec_decode.proposal import Kept, Proposal
from draftsmith.inference.spec_decode.round_plan import RoundPlan

PROBED_EVERY = 32  # rounds: the head drafts for all rows, whether it pays or not


class GatedPlan(RoundPlan):
    """Drafts of a head, or those of the proposer beside it, by what they are expected to gain for
    their time. `beside`, `head`: what became of the drafts of each, taught by `learn`; room [B]:
    drafts that each row may have."""

    def __init__(
        self, beside: Acceptance, head: Acceptance, room: Sequence[int], costs: RoundCosts
    ) -> None:
        super().__init__(room)
        self._beside = beside
        self._head = head
        self._verify = costs.verify  # V(w + 1) for w = 0 … K
        self._time_of_head = costs.verify[max(room)] + costs.draft[max(room)]
        self._probes = head.idle_rounds >= PROBED_EVERY - 1 and any(room)
        self._drafted_beside = Proposal.empty(len(room))
        self._asked = [0] * len(room)  # drafts of the head, in each row

    @override
    def divide(self, beside: Proposal) -> tuple[list[int], list[int]]:
        """A row takes drafts of one of them alone, whichever gains more for its time."""
        self._drafted_beside = beside
        gains = [self._gains_beside(row) for row in range(len(self.limits))]
        # Ē [B]
        means = [sum(accumulate(self._head.rates(limit), mul)) for limit in self.limits]
        rate = self._rate(means)
        surplus_without_head = [
            sum(row[min(width, len(row) - 1)] for row in gains) - rate * self._verify[width]
            for width in range(1 + max(beside.counts))
        ]
        largest = max(surplus_without_head)
        most = [max(row[-1], mean) for row, mean in zip(gains, means, strict=True)]
        if not self._probes and sum(most) - rate * self._time_of_head <= largest:
            width = surplus_without_head.index(largest)
            return [min(count, width) for count in beside.counts], self._asked
        self._asked = [
            limit if self._probes or mean >= row[-1] else 0
            for limit, mean, row in zip(self.limits, means, gains, strict=True)
        ]
        pairs = zip(beside.counts, self._asked, strict=True)
        return [0 if asked else count for count, asked in pairs], self._asked

    def _rate(self, means: Sequence[float]) -> float:
        """ρ, of the Ē of each row."""
        rows = len(means)
        return max(rows / self._verify[0], (rows + sum(means)) / self._time_of_head)

    def _gains_beside(self, row: int) -> list[float]:
        """E(w) of the draft beside, for as many w as it has tokens: [0, …]."""
        proposal = self._drafted_beside
        if proposal.confidence is None:
            return [0.0]
        confidence = proposal.confidence[row, : proposal.counts[row]].tolist()
        survival = accumulate(self._beside.by_confidence(confidence), mul)
        return list(accumulate(survival, initial=0.0))

    @override
    def learn(self, kept: Sequence[Kept]) -> None:
        """Of both: a draft beside counts as right if it was committed, whoever drafted it."""
        self._learn_beside(kept)
        if not any(self._asked):
            self._head.idle_rounds += 1
            return
        accepted = [len(row.nodes) for row in kept]
        self._head.learn(self._asked, accepted, ())
        further_time = self._time_of_head / self._verify[0] - 1
        paid = sum(accepted) >= len(accepted) * further_time
        if not (self._probes and paid):  # a probe that paid is followed by another
            self._head.idle_rounds = 0

    def _learn_beside(self, kept: Sequence[Kept]) -> None:
        """A token of the draft beside is right if it was committed, whoever drafted it; it is known
        as far as tokens were."""
        proposal = self._drafted_beside
        if proposal.confidence is None:
            return
        known: list[int] = []
        right: list[int] = []
        for row, row_kept in enumerate(kept):
            draft = proposal.drafted[row][: proposal.counts[row]]
            known.append(min(len(draft), len(row_kept.tokens)))
            same = [a == b for a, b in zip(draft, row_kept.tokens, strict=False)]
            right.append([*same, False].index(False))
        self._beside.learn(known, right, proposal.confidence.T.tolist())
