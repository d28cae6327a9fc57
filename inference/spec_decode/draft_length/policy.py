"""How many tokens are drafted and verified, per row and round: always K, K by batch size, or what pays now.

`DraftLength` is what the engine asks. It gives limits before a round, has the last word on what is verified, and is
told what became of it. Knows no target, no cache and no rule; what pays is
inference/spec_decode/draft_length/round_plan.py's to say.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from inference.requests.request import Request
from inference.spec_decode.draft_length.acceptance_estimator import AcceptanceEstimator, RequestHistory
from inference.spec_decode.draft_length.costs import Forward, RoundCosts
from inference.spec_decode.draft_length.round_plan import RoundPlan
from inference.spec_decode.proposal import Proposal
from inference.spec_decode.proposers.base import Proposer

Schedule = Sequence[tuple[int, int, int]]  # (smallest batch size, largest, K), ascending

PROBING = 0.01  # share of the time that may be lost on drafts that are not expected to pay
ALLOWANCE = 4.0  # steps without drafts that may be lost so at once, and when nothing is known yet


class DraftLength:
    """As many drafts as there is room for, or as `schedule` says of the batch size; 0 leaves drafting out. No row has
    more than its request asks for."""

    def __init__(self, num_speculative_tokens: int, schedule: Schedule | None = None) -> None:
        self.num_speculative_tokens, self._schedule = num_speculative_tokens, schedule or ()

    def attach(self, proposer: Proposer, forward: Forward) -> None:
        """Called once, by the engine: who drafts, and a forward of the target for its time to be taken."""

    def limits(self, rows: Sequence[Request]) -> list[int]:
        """Before a round: drafts per row at most."""
        tokens = self.num_speculative_tokens
        for smallest, _, scheduled in self._schedule:
            if smallest <= len(rows):  # a gap between two ranges belongs to the one below, as in vLLM
                tokens = min(scheduled, self.num_speculative_tokens)
        return [min(tokens, request.draft_limit, request.most_drafts) for request in rows]

    def settle(self, proposal: Proposal) -> Proposal:
        """After drafting: what of it is verified."""
        return proposal

    def learn(self, verified: Sequence[int], accepted: Sequence[int], draft_time: float, verify_time: float) -> None:
        """After the round: drafts verified and accepted per row; the seconds that drafting and the rest took."""


class AdaptiveDraftLength(DraftLength):
    """What pays now, up to `num_speculative_tokens` and the schedule.

    Where drafting is not expected to pay, the best of the losing lengths is still tried now and then, since what is
    never tried cannot be found to pay again. Tries have an allowance: it grows by `PROBING` of the time of every step,
    holds `ALLOWANCE` steps at most, and a try takes from it what it lost against plain steps (or returns what it won).
    """

    def __init__(self, num_speculative_tokens: int, costs: RoundCosts, schedule: Schedule | None = None) -> None:
        super().__init__(num_speculative_tokens, schedule)
        self._costs = costs
        self._estimator = AcceptanceEstimator(num_speculative_tokens)
        self._histories: WeakKeyDictionary[Request, RequestHistory] = WeakKeyDictionary()
        self._plan: RoundPlan | None = None
        self._limits: list[int] = []
        self._probing = self._asks = False
        self._allowance = ALLOWANCE  # in steps without drafts

    def attach(self, proposer: Proposer, forward: Forward) -> None:
        self._costs.attach(proposer, forward)
        proposer.go_on, self._asks = self._go_on, proposer.asks

    def limits(self, rows: Sequence[Request]) -> list[int]:
        room = super().limits(rows)
        self._plan, self._probing, self._limits = None, False, room
        if not max(room):
            return room
        histories = [self._histories.setdefault(request, RequestHistory()) for request in rows]
        plan = self._plan = RoundPlan(self._estimator, histories, room, *self._costs.of(rows))
        if plan.free:
            depth = max(room)
        elif self._asks and (plan.planned or plan.worth_looking()):
            depth = max(room)  # the proposer is stopped on the way
        else:
            depth = (0 if self._asks else plan.worth_drafting()) or self._probe(plan)
        self._limits = [min(limit, depth) for limit in room]
        return self._limits

    def settle(self, proposal: Proposal) -> Proposal:
        plan = self._plan
        if plan is None or plan.seen or not proposal.width or proposal.parents is not None:
            return proposal
        plan.limit(proposal.counts)
        told: list[list[float]] | list[None] = [None] * proposal.width
        if proposal.confidence is not None:
            told = proposal.confidence.T.tolist()
        for confidence in told:
            if not self._answer(plan, confidence, drafted=True):
                break
        return proposal.shortened(plan.settled)

    def learn(self, verified: Sequence[int], accepted: Sequence[int], draft_time: float, verify_time: float) -> None:
        plan = self._plan
        if plan is None:
            return
        verified = [min(count, limit) for count, limit in zip(verified, self._limits, strict=True)]
        depth = plan.seen if self._asks else max(self._limits)
        width = max(verified)
        took = plan.time(depth, width)
        self._allowance += PROBING * took
        if self._probing:
            self._allowance -= took - 1 - sum(accepted) / len(accepted)
        self._allowance = min(self._allowance, ALLOWANCE)
        self._costs.learn(len(verified), depth, width, draft_time, verify_time)
        self._estimator.learn(plan.outlook, plan.histories, verified, accepted, plan.told)

    def _go_on(self, confidence: Sequence[float]) -> int:
        """`Proposer.go_on`."""
        assert self._plan is not None
        return self._answer(self._plan, confidence, drafted=False)

    def _answer(self, plan: RoundPlan, confidence: Sequence[float] | None, *, drafted: bool) -> int:
        return plan.show(confidence, drafted=drafted) or (0 if plan.settled else self._probe(plan))

    def _probe(self, plan: RoundPlan) -> int:
        """Drafts to try although they are not expected to pay: 0, unless the allowance covers losing them all."""
        drafts = plan.least_bad
        while drafts and plan.time(drafts, drafts) - 1 > ALLOWANCE:
            drafts -= 1
        if not drafts or plan.time(drafts, drafts) - 1 > self._allowance:
            return 0
        self._probing = True
        return plan.force(drafts)
