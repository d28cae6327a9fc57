"""RoundPlan: how many tokens one round drafts and verifies.

    plan = draft_length.plan(rows)             what there is room for, and what pays
    proposal = proposer.propose(rows, plan)    drafts within the plan's limits
    proposal = plan.settle(proposal)           the part of it that is verified
    plan.learn(kept)                           what became of it

An adaptive round of B rows that drafts to depth d and verifies w tokens per row

    commits   B + Σ_b Σ_{k≤w} S_bk     S_bk: probability that the first k drafts of row b are all
                                       accepted
    costs     V(w + 1) + D(d)          costs.py

and the length is the argmax of the quotient. Its best value before anything is drafted, the rate ρ,
is the price at which the round then goes on (Dinkelbach 1967): while some number of further drafts
gains more tokens than ρ times their time. S is a product of conditional acceptances: κ times the
drafter's confidence where it is known, the moving mean of the depth where it is not.

**No look-ahead.** Verification is lossless only if the decision to verify draft k does not depend
on the token x_k. It may depend on x_1 .. x_{k-1} and on the distribution that x_k is drawn from. A
plan reads no token, of a proposal only how many there are. It is given confidences, one depth at a
time, each before the draw at its depth, and every answer is final. No target, no cache and no
verification rule belongs here."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from typing_extensions import override

from draftsmith.inference.spec_decode.acceptance import Acceptance
from draftsmith.inference.spec_decode.costs import RoundCosts
from draftsmith.inference.spec_decode.proposal import Kept, Proposal

PROBE_SHARE = 0.01  # of the time may be lost on drafts that are not expected to pay
FREE_DRAFTING = 0.01  # of a plain decoding step, for the rest of K: drafted without asking


class RoundPlan:
    """As many drafts as there is room for, all of which are verified.

    limits            [B] most drafts of each row, of a tree its nodes; 0 is none in this round
    limits_asking     [B] the same of a proposer that asks `go_on` before each depth
    reads_confidence  it goes by the drafter's confidence: a proposer that `stops_early` asks
                      `go_on`, others report `Proposal.confidence`
    """

    reads_confidence: bool = False

    def __init__(self, limits: Sequence[int]) -> None:
        self.limits = list(limits)
        self.limits_asking = self.limits

    def go_on(self, confidence: Sequence[float]) -> int:
        """How many more drafts per row are asked for, the next one included; 0 ends the chain.
        confidence [B]: how sure the drafter is of the next draft of each row, a probability that is
        known before the draft is drawn."""
        return max(self.limits)

    def divide(self, beside: Proposal) -> tuple[list[int], list[int]]:
        """[B], [B]: how many drafts each row takes of a proposer beside a head, which has drafted
        already, and how many the head is asked for; one of the two is 0. Here the head is asked
        where the other has none."""
        pairs = zip(self.limits, beside.counts, strict=True)
        return beside.counts, [0 if count else limit for limit, count in pairs]

    def settle(self, proposal: Proposal) -> Proposal:
        """The part of the proposal that is verified. Once, before verification."""
        return proposal

    def learn(self, kept: Sequence[Kept]) -> None:
        """What the target kept of the drafts of each row. Once, after verification."""


class AdaptivePlan(RoundPlan):
    """As many drafts as are expected to pay, and those that probe whether drafts pay again.

    What is never tried cannot be found to pay again: where nothing is drafted, drafts are forced
    once losing all of them is PROBE_SHARE of the time since the last ones.

    The rate ρ is the best expected number of tokens per time of this round. The gain of w further
    drafts is the sum of S over rows and depths, the tokens that they are expected to commit; they
    pay if that is more than ρ times their time."""

    reads_confidence = True

    def __init__(self, acceptance: Acceptance, room: Sequence[int], costs: RoundCosts) -> None:
        """room [B]: drafts that each row may have, not all 0. `acceptance` is taught by `learn`."""
        self._acceptance = acceptance
        self._room = list(room)
        self._verify = costs.verify  # V(w + 1) for w = 0 … K
        self._draft = costs.draft  # D(w)
        most = max(room)
        # [most][B]: acceptance of a draft whose confidence is not known
        self._mean_acceptance = [[rate] * len(room) for rate in acceptance.rates(most)]
        # drafts that will be verified, in every row that has as many
        self._committed_length = 0
        # [B]: S, the probability that the committed drafts are all accepted
        self._survival = [1.0] * len(room)
        self._confidences: list[Sequence[float]] = []  # [d][B], as far as they were shown
        self._verified = [0] * len(room)  # drafts of each row, once settled
        # a round commits a token of each row, and what its drafts gain
        expected_tokens = list(accumulate(self._gains(), initial=float(len(room))))
        rates = [
            expected_tokens[length] / (self._verify[length] + self._draft[length])
            for length in range(most + 1)
        ]
        self._rate = max(rates)  # ρ
        best_nonzero_length = max(range(1, most + 1), key=rates.__getitem__)
        # drafts to be verified whether they pay or not
        self._forced_length = 0
        lost = self._relative_time(best_nonzero_length) - 1  # if none is accepted
        if acceptance.idle_rounds * PROBE_SHARE > lost:
            self._forced_length = best_nonzero_length
        # drafts that pay if no confidence becomes known on the way
        paying_length = best_nonzero_length if rates[0] < self._rate else 0
        self._unasked_length = max(paying_length, self._forced_length)
        super().__init__(self._up_to(self._drafted_length(most)))
        if self._unasked_length:
            self.limits_asking = self._up_to(most)  # `go_on` ends it where it does not pay

    def _up_to(self, length: int) -> list[int]:
        return [min(row, length) for row in self._room]

    def _drafted_length(self, most: int) -> int:
        """How many of `most` tokens are drafted without asking; how many of them are verified is
        decided afterwards."""
        rest = self._draft[most] - self._draft[self._unasked_length]
        takes_no_time = rest < FREE_DRAFTING * self._verify[0]
        return most if takes_no_time else self._unasked_length

    def _relative_time(self, drafts: int) -> float:
        """The time of a round that drafts and verifies so many, in plain decoding steps."""
        return (self._verify[drafts] + self._draft[drafts]) / self._verify[0]

    # ------------------------------------------------------------------ the length

    @override
    def go_on(self, confidence: Sequence[float]) -> int:
        """As many as gain the most over their time; `confidence` [B], of the next draft."""
        return self._decide_next(confidence, drafted=False)

    @override
    def settle(self, proposal: Proposal) -> Proposal:
        """Shortened to what pays by the proposal's confidence, unless `go_on` ended the chain."""
        confidences: list[list[float]] | None = None
        if proposal.confidence is not None:
            confidences = proposal.confidence.T.tolist()  # [K][B]
        settled = proposal.shortened(self._verified_length(proposal.counts, confidences))
        self._verified = settled.counts
        return settled

    def _verified_length(
        self, counts: Sequence[int], confidences: Sequence[Sequence[float]] | None
    ) -> int:
        """How many drafts of each row are verified, of counts [B] that were drafted with these
        confidences [K][B], as far as they are known."""
        if self._confidences:
            return max(counts)  # decided while they were drafted
        self._room = [min(pair) for pair in zip(self._room, counts, strict=True)]
        if confidences is None:
            self._committed_length = self._unasked_length
            return self._committed_length
        for confidence in confidences:
            if not self._decide_next(confidence, drafted=True):
                break
        return self._committed_length

    def _decide_next(self, confidence: Sequence[float], *, drafted: bool) -> int:
        """The number of drafts to go on with, the next one included, given its confidence [B]; 0 is
        final. `drafted`: the chain is there already, and costs nothing more."""
        acceptance = self._acceptance.by_confidence(confidence)
        self._confidences.append(confidence)
        paying = self._most_paying(self._gains(acceptance), drafted=drafted)
        further = max(paying, self._forced_length - self._committed_length)
        if further:
            self._survival = self._survives(self._survival, self._committed_length, acceptance)
            self._committed_length += 1
        return further

    # ------------------------------------------------------------------ its arithmetic

    def _survives(
        self, survival: Sequence[float], k: int, acceptance: Sequence[float]
    ) -> list[float]:
        """S [B] of the first k + 1 drafts from that of the first k and the acceptance of the next;
        0 in rows without such a draft."""
        return [
            before * rate if k < limit else 0.0
            for before, rate, limit in zip(survival, acceptance, self._room, strict=True)
        ]

    def _gains(self, *known: Sequence[float]) -> list[float]:
        """Expected accepted tokens, over all rows, of each further depth. known: acceptance [B] of
        the next one; those behind it have the means of their depths."""
        survival = self._survival
        gains: list[float] = []
        first_unknown = self._committed_length + len(known)
        acceptances = [*known, *self._mean_acceptance[first_unknown:]]
        for k, acceptance in enumerate(acceptances, self._committed_length):
            survival = self._survives(survival, k, acceptance)
            gains.append(sum(survival))
        return gains

    def _most_paying(self, gains: Sequence[float], *, drafted: bool) -> int:
        """How many further drafts gain the most over ρ times their time; 0 if none gains any. The
        forward that gave the next draft's confidence has been paid for."""
        committed = self._committed_length
        most_paying = 0
        largest_surplus = 0.0
        for further, gain in enumerate(accumulate(gains), 1):
            length = committed + further
            time = self._verify[length] - self._verify[committed]
            if not drafted:
                time += self._draft[length] - self._draft[committed + 1]
            surplus = gain - self._rate * time
            if surplus > largest_surplus:
                most_paying = further
                largest_surplus = surplus
        return most_paying

    # ------------------------------------------------------------------ what became of it

    @override
    def learn(self, kept: Sequence[Kept]) -> None:
        """With the confidences that the plan was given; a round without drafts counts as idle."""
        width = max(self._verified)
        if not width:
            self._acceptance.idle_rounds += 1
            return
        accepted = [len(row.nodes) for row in kept]
        self._acceptance.learn(self._verified, accepted, self._confidences)
        paid = sum(accepted) >= len(accepted) * (self._relative_time(width) - 1)
        if not (self._forced_length and paid):  # a probe that paid is followed by another
            self._acceptance.idle_rounds = 0
