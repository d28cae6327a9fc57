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
        self.num_speculative_tokens, self._schedule = num_speculative_tokens, schedule or ()

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
        self._accepted, self._tried = [0.0] * depth, [0.0] * depth
        self._came, self._expected = PRIOR_OUTCOMES, PRIOR_OUTCOMES  # with a known confidence

    def rates(self, depth: int) -> list[float]:
        """P(draft k is accepted | the drafts before it are) [depth]."""
        rates, before = [], PRIOR_ACCEPTANCE
        for accepted, tried in zip(self._accepted[:depth], self._tried, strict=False):
            before = (accepted + PRIOR_OUTCOMES * before) / (tried + PRIOR_OUTCOMES)
            rates.append(before)
        return rates

    def given(self, confidence: Sequence[float]) -> list[float]:
        """The same of drafts whose confidence is known: κ times it, κ = accepted ÷ expected."""
        kappa = self._came / self._expected
        return [min(kappa * c, MOST_LIKELY) for c in confidence]

    def learn(
        self, verified: Sequence[int], accepted: Sequence[int], confidences: Confidences
    ) -> None:
        """Verified and accepted [B]; confidences of the depths where they were known."""
        self._accepted = [KEPT * x for x in self._accepted]
        self._tried = [KEPT * x for x in self._tried]
        self._came, self._expected = KEPT * self._came, KEPT * self._expected
        for b, (count, kept) in enumerate(zip(verified, accepted, strict=True)):
            for k in range(min(kept + 1, count)):
                self._tried[k] += 1
                self._accepted[k] += k < kept
                if k < len(confidences):
                    self._expected += min(confidences[k][b], MOST_LIKELY)
                    self._came += k < kept


class RoundPlan:
    """The length of one round. room [B]: drafts that each row may have, not all 0; verify, draft:
    V(w + 1) and D(w) for w = 0 … K.

    best_length          drafts that pay if no confidence were known on the way; may be 0
    best_nonzero_length  the same, of at least 1
    forced_length        drafts to be verified whether they pay or not
    committed_length     drafts that will be verified, in every row that has as many
    confidences          [d][B] shown so far
    """

    def __init__(
        self,
        acceptance: Acceptance,
        room: Sequence[int],
        verify: Sequence[float],
        draft: Sequence[float],
    ) -> None:
        self._acceptance, self.room = acceptance, list(room)
        self._verify, self._draft = verify, draft
        self._means = [[a] * len(room) for a in acceptance.rates(max(room))]  # [K][B]
        self._survival = [1.0] * len(room)  # [B] that the committed drafts are all accepted
        self.committed_length = self.forced_length = 0
        self.confidences: list[Sequence[float]] = []
        tokens = accumulate([float(len(room)), *self._gains()])
        ratios = [t / (v + d) for t, v, d in zip(tokens, verify, draft, strict=False)]
        self._rate = max(ratios)  # ρ
        self.best_nonzero_length = max(range(1, max(room) + 1), key=ratios.__getitem__)
        self.best_length = self.best_nonzero_length if ratios[0] < self._rate else 0

    def relative_time(self, drafts: int) -> float:
        """The time of a round that drafts and verifies so many, in plain decoding steps."""
        return (self._verify[drafts] + self._draft[drafts]) / self._verify[0]

    def decide_next(self, confidence: Sequence[float], *, drafted: bool) -> int:
        """The number of drafts to go on with, the next one included, given its confidence [B]; 0 is
        final. `drafted`: the chain is there already, and costs nothing more."""
        k, this = self.committed_length, self._acceptance.given(confidence)
        self.confidences.append(confidence)
        further = max(self._best(self._gains(this), drafted), self.forced_length - k)
        if further:
            self._survival, self.committed_length = self._survives(self._survival, k, this), k + 1
        return further

    def _survives(self, survival: Sequence[float], k: int, rates: Sequence[float]) -> list[float]:
        """Survival [B] of draft k + 1, 0 in rows without such a draft."""
        return [s * a * (k < limit) for s, a, limit in zip(survival, rates, self.room)]

    def _gains(self, *known: Sequence[float]) -> list[float]:
        """Expected accepted tokens, over all rows, of each further depth. known: acceptance [B] of
        the next one; those behind it have the means of their depths."""
        survival, gains = self._survival, []
        first = self.committed_length
        for k, rates in enumerate([*known, *self._means[first + len(known) :]], first):
            survival = self._survives(survival, k, rates)
            gains.append(sum(survival))
        return gains

    def _best(self, gains: Sequence[float], drafted: bool) -> int:
        """How many further drafts gain the most over ρ times their time; 0 if none gains any. The
        forward that gave the next draft's confidence has been paid for."""
        k, best, most, gained = self.committed_length, 0, 0.0, 0.0
        for w, gain in enumerate(gains, k + 1):
            gained += gain
            drafting = 0.0 if drafted else self._draft[w] - self._draft[k + 1]
            time = self._verify[w] - self._verify[k] + drafting
            if gained - self._rate * time > most:
                best, most = w - k, gained - self._rate * time
        return best


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
        depth = max(plan.best_length, plan.forced_length)
        free = draft[most] - draft[depth] < FREE_DRAFTING * verify[0]
        if not free and not (depth and self._stops_early):  # where `go_on` stops the proposer
            most = depth
        return [min(limit, most) for limit in room]

    @override
    def settle(self, proposal: Proposal) -> Proposal:
        plan = self._plan
        if plan is None or plan.confidences or not proposal.width:
            return proposal
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
        plan, width = self._plan, max(verified)
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
