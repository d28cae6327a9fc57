"""DraftLength: how many tokens are drafted and verified, per row and round. Always K, K by batch
size, or adaptive.

The engine calls `limits` before a round, `settle` after drafting and `learn` after verification.
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
plan is given no tokens. It is given confidences, one depth at a time, each before the draw at its
depth, and every answer is final. No target, no cache and no verification rule belongs here."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import inf

from typing_extensions import override

from draftsmith.inference.requests.request import Request
from draftsmith.inference.spec_decode.costs import Forward, GivenCosts, RoundCosts
from draftsmith.inference.spec_decode.proposal import Proposal
from draftsmith.inference.spec_decode.proposers.base import Proposer

Schedule = Sequence[tuple[int, int, int]]  # (smallest batch size, largest, K), ascending
Confidences = Sequence[Sequence[float]]  # [d][B]

KEPT = 0.98  # of what was counted, per round with drafts: means over some 50 rounds
PRIOR_ACCEPTANCE, PRIOR_OUTCOMES = 0.7, 4.0  # of the first depth; the others': the one before
MOST_LIKELY = 0.99  # no draft is surer
PROBE_SHARE = 0.01  # of the time may be lost on drafts that are not expected to pay
FREE_DRAFTING = 0.01  # of a plain decoding step, for the rest of K: drafted without asking


class DraftLength:
    """As many drafts as there is room for, or as `schedule` says of the batch size, where 0 turns
    drafting off. No row has more than its request allows."""

    def __init__(self, num_speculative_tokens: int, schedule: Schedule | None = None) -> None:
        self.num_speculative_tokens = num_speculative_tokens
        self._schedule = schedule or ()

    def attach(self, proposer: Proposer, forward: Forward) -> None:
        """Called once, by the engine. `forward`: a forward of the target whose time can be
        measured."""

    def limits(self, rows: Sequence[Request]) -> list[int]:
        """The most drafts of each row, before a round."""
        tokens = self.num_speculative_tokens
        for smallest, _, scheduled in self._schedule:
            if smallest <= len(rows):  # a gap between two ranges belongs to the one below: vLLM's
                tokens = min(scheduled, self.num_speculative_tokens)
        return [min(tokens, request.draft_limit, request.most_drafts) for request in rows]

    def settle(self, proposal: Proposal) -> Proposal:
        """The part of a proposal that is verified."""
        return proposal

    def learn(self, verified: Sequence[int], accepted: Sequence[int]) -> None:
        """Drafts verified and accepted per row of the round."""

    def sizes_to_measure(self, most_rows: int) -> list[int]:
        """Batch sizes whose first round is timed; the others, up to `most_rows`, then share."""
        return []

    def forget(self) -> None:
        """Forgets what became of drafts; measured times stay."""


class Acceptance:
    """What became of earlier drafts, over all requests, as moving means.

    Depths that are not reached fade too, towards the depth before them, so that a length which was
    given up is tried again."""

    def __init__(self, depth: int) -> None:
        # by depth, of all drafts that were reached
        self._accepted = [0.0] * depth
        self._reached = [0.0] * depth
        # of reached drafts with a known confidence: as many as were accepted, and as many as were
        # to be expected by the confidence alone
        self._confident_accepted = PRIOR_OUTCOMES
        self._confident_expected = PRIOR_OUTCOMES

    def rates(self, depth: int) -> list[float]:
        """P(draft k is accepted | the drafts before it are) [depth]."""
        rates: list[float] = []
        rate = PRIOR_ACCEPTANCE
        for accepted, reached in zip(self._accepted[:depth], self._reached, strict=False):
            rate = (accepted + PRIOR_OUTCOMES * rate) / (reached + PRIOR_OUTCOMES)
            rates.append(rate)
        return rates

    def by_confidence(self, confidence: Sequence[float]) -> list[float]:
        """The same of drafts whose confidence is known: κ times it, κ = accepted ÷ expected."""
        kappa = self._confident_accepted / self._confident_expected
        return [min(kappa * sure, MOST_LIKELY) for sure in confidence]

    def learn(
        self, verified: Sequence[int], accepted: Sequence[int], confidences: Confidences
    ) -> None:
        """Verified and accepted [B]; confidences of the depths where they were known."""
        self._accepted = [KEPT * count for count in self._accepted]
        self._reached = [KEPT * count for count in self._reached]
        self._confident_accepted *= KEPT
        self._confident_expected *= KEPT
        for row, (num_verified, num_accepted) in enumerate(zip(verified, accepted, strict=True)):
            # the first draft that is not accepted was reached, those behind it were not
            num_reached = min(num_accepted + 1, num_verified)
            for k in range(num_reached):
                was_accepted = k < num_accepted
                self._reached[k] += 1
                self._accepted[k] += was_accepted
                if k < len(confidences):
                    self._confident_expected += min(confidences[k][row], MOST_LIKELY)
                    self._confident_accepted += was_accepted


class RoundPlan:
    """The length of one round. room [B]: drafts that each row may have, not all 0; verify, draft:
    V(w + 1) and D(w) for w = 0 … K.

    best_length          drafts that pay if no confidence were known on the way; may be 0
    best_nonzero_length  the same, of at least 1
    forced_length        drafts to be verified whether they pay or not
    committed_length     drafts that will be verified, in every row that has as many
    confidences          [d][B] shown so far

    The rate ρ is the best expected number of tokens per time of this round. The gain of w further
    drafts is the sum of S over rows and depths, the tokens that they are expected to commit; they
    pay if that is more than ρ times their time."""

    def __init__(
        self,
        acceptance: Acceptance,
        room: Sequence[int],
        verify: Sequence[float],
        draft: Sequence[float],
    ) -> None:
        self._acceptance = acceptance
        self.room = list(room)
        self._verify = verify
        self._draft = draft
        most = max(room)
        # [most][B]: acceptance of a draft whose confidence is not known
        self._mean_acceptance = [[rate] * len(room) for rate in acceptance.rates(most)]
        # [B]: S, the probability that the committed drafts are all accepted
        self._survival = [1.0] * len(room)
        self.committed_length = 0
        self.forced_length = 0
        self.confidences: list[Sequence[float]] = []
        # a round commits a token of each row, and what its drafts gain
        expected_tokens = list(accumulate(self._gains(), initial=float(len(room))))
        rates = [
            expected_tokens[length] / (verify[length] + draft[length]) for length in range(most + 1)
        ]
        self._rate = max(rates)  # ρ
        self.best_nonzero_length = max(range(1, most + 1), key=rates.__getitem__)
        self.best_length = self.best_nonzero_length if rates[0] < self._rate else 0

    def relative_time(self, drafts: int) -> float:
        """The time of a round that drafts and verifies so many, in plain decoding steps."""
        return (self._verify[drafts] + self._draft[drafts]) / self._verify[0]

    def decide_next(self, confidence: Sequence[float], *, drafted: bool) -> int:
        """The number of drafts to go on with, the next one included, given its confidence [B]; 0 is
        final. `drafted`: the chain is there already, and costs nothing more."""
        acceptance = self._acceptance.by_confidence(confidence)
        self.confidences.append(confidence)
        paying = self._most_paying(self._gains(acceptance), drafted=drafted)
        further = max(paying, self.forced_length - self.committed_length)
        if further:
            self._survival = self._survives(self._survival, self.committed_length, acceptance)
            self.committed_length += 1
        return further

    def _survives(
        self, survival: Sequence[float], k: int, acceptance: Sequence[float]
    ) -> list[float]:
        """S [B] of the first k + 1 drafts from that of the first k and the acceptance of the next;
        0 in rows without such a draft."""
        return [
            before * rate if k < limit else 0.0
            for before, rate, limit in zip(survival, acceptance, self.room, strict=True)
        ]

    def _gains(self, *known: Sequence[float]) -> list[float]:
        """Expected accepted tokens, over all rows, of each further depth. known: acceptance [B] of
        the next one; those behind it have the means of their depths."""
        survival = self._survival
        gains: list[float] = []
        first_unknown = self.committed_length + len(known)
        acceptances = [*known, *self._mean_acceptance[first_unknown:]]
        for k, acceptance in enumerate(acceptances, self.committed_length):
            survival = self._survives(survival, k, acceptance)
            gains.append(sum(survival))
        return gains

    def _most_paying(self, gains: Sequence[float], *, drafted: bool) -> int:
        """How many further drafts gain the most over ρ times their time; 0 if none gains any. The
        forward that gave the next draft's confidence has been paid for."""
        committed = self.committed_length
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


class AdaptiveDraftLength(DraftLength):
    """The length that pays now, at most K; `schedule` limits it too. Costs: see RoundCosts.

    What is never tried cannot be found to pay again: where nothing is drafted, drafts are forced
    once losing all of them is PROBE_SHARE of the time since the last ones."""

    def __init__(
        self,
        num_speculative_tokens: int,
        costs: GivenCosts | None = None,
        schedule: Schedule | None = None,
    ) -> None:
        super().__init__(num_speculative_tokens, schedule)
        self._costs = RoundCosts(num_speculative_tokens, costs)
        self._acceptance = Acceptance(num_speculative_tokens)
        self._idle = inf  # rounds that a probe may make up for
        self._plan: RoundPlan | None = None  # of the round; None: nothing may be drafted
        self._stops_early = False  # what `attach` was told of the proposer

    @override
    def attach(self, proposer: Proposer, forward: Forward) -> None:
        self._costs.attach(proposer, forward)
        proposer.go_on = self._continues
        self._stops_early = proposer.stops_early

    def _continues(self, confidence: Sequence[float]) -> int:
        assert self._plan is not None  # `limits` has planned the round
        return self._plan.decide_next(confidence, drafted=False)

    @override
    def limits(self, rows: Sequence[Request]) -> list[int]:
        room = super().limits(rows)
        most = max(room)
        self._plan = None
        if not most:
            return room
        verify, draft = self._costs.of(rows)
        plan = RoundPlan(self._acceptance, room, verify, draft)
        self._plan = plan
        if self._idle * PROBE_SHARE > plan.relative_time(plan.best_nonzero_length) - 1:
            plan.forced_length = plan.best_nonzero_length
        most = self._drafted_length(plan, most, verify, draft)
        return [min(limit, most) for limit in room]

    def _drafted_length(
        self, plan: RoundPlan, most: int, verify: Sequence[float], draft: Sequence[float]
    ) -> int:
        """How many tokens are drafted, `most` at most; how many of them are verified is decided
        after each confidence."""
        length = max(plan.best_length, plan.forced_length)
        if draft[most] - draft[length] < FREE_DRAFTING * verify[0]:
            return most  # the rest takes no time
        if length and self._stops_early:
            return most  # `go_on` ends drafting where it does not pay
        return length

    @override
    def settle(self, proposal: Proposal) -> Proposal:
        plan = self._plan
        if plan is None or plan.confidences or not proposal.width:
            return proposal  # nothing to decide, or decided while it was drafted
        plan.room = [min(pair) for pair in zip(plan.room, proposal.counts, strict=True)]
        if proposal.confidence is None:
            plan.committed_length = max(plan.best_length, plan.forced_length)
        else:
            for confidence in proposal.confidence.T.tolist():  # [width][B]
                if not plan.decide_next(confidence, drafted=True):
                    break
        return proposal.shortened(plan.committed_length)

    @override
    def learn(self, verified: Sequence[int], accepted: Sequence[int]) -> None:
        plan = self._plan
        width = max(verified)
        if plan is None:
            return
        if not width:
            self._idle += 1
            return
        self._acceptance.learn(verified, accepted, plan.confidences)
        paid = sum(accepted) >= len(accepted) * (plan.relative_time(width) - 1)
        if not (plan.forced_length and paid):  # a probe that paid is followed by another
            self._idle = 0

    @override
    def sizes_to_measure(self, most_rows: int) -> list[int]:
        return self._costs.sizes(most_rows)

    @override
    def forget(self) -> None:
        self._acceptance = Acceptance(self.num_speculative_tokens)
        self._idle = inf
