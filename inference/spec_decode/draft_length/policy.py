"""DraftLength: how many tokens are drafted and verified, per row and round. Always K, K by batch
size, or adaptive.

The engine calls `limits` before a round, `settle` after drafting and `learn` after verification.
Which length pays is computed in draft_length/round_plan.py. No target, no cache and no verification
rule belongs here."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from inference.requests.request import Request
from inference.spec_decode.draft_length.acceptance_estimator import (
    AcceptanceEstimator,
    RequestHistory,
)
from inference.spec_decode.draft_length.costs import Forward, MeasuredCosts, RoundCosts
from inference.spec_decode.draft_length.round_plan import RoundPlan
from inference.spec_decode.proposal import Proposal
from inference.spec_decode.proposers.base import Proposer

Schedule = Sequence[tuple[int, int, int]]  # (smallest batch size, largest, K), ascending

PROBE_FRACTION = 0.01  # of the time may be lost on drafts that are not expected to pay
MAX_ALLOWANCE = 4.0  # plain decoding steps that may be lost so at once, and at the start


class DraftLength:
    """As many drafts as there is room for, or as `schedule` says of the batch size, where 0 turns
    drafting off. No row has more than its request allows."""

    measures_costs = False  # it times rounds of every batch size when it meets the first one

    def __init__(self, num_speculative_tokens: int, schedule: Schedule | None = None) -> None:
        self.num_speculative_tokens, self._schedule = num_speculative_tokens, schedule or ()

    def attach(self, proposer: Proposer, forward: Forward) -> None:
        """Called once, by the engine. `forward`: a forward of the target whose time can be
        measured."""

    def limits(self, rows: Sequence[Request]) -> list[int]:
        """The most drafts of each row, before a round."""
        tokens = self.num_speculative_tokens
        for smallest, _, scheduled in self._schedule:
            if smallest <= len(
                rows
            ):  # a gap between two ranges belongs to the one below, as in vLLM
                tokens = min(scheduled, self.num_speculative_tokens)
        return [min(tokens, request.draft_limit, request.most_drafts) for request in rows]

    def settle(self, proposal: Proposal) -> Proposal:
        """The part of a proposal that is verified."""
        return proposal

    def learn(
        self,
        verified: Sequence[int],
        accepted: Sequence[int],
        draft_time: float,
        verify_time: float,
    ) -> None:
        """After the round: drafts verified and accepted per row, and the seconds that drafting and
        the rest took."""


class AdaptiveDraftLength(DraftLength):
    """The length that maximises accepted tokens per time, up to `num_speculative_tokens` and the
    schedule.

    Where drafting is not expected to pay, the best length above 0 is still tried now and then,
    since acceptance that is never measured cannot be found to have risen. Such probes have an
    allowance. It grows by `PROBE_FRACTION` of the time of every round, up to `MAX_ALLOWANCE` steps,
    and a probe takes from it what it lost against plain decoding."""

    def __init__(
        self, num_speculative_tokens: int, costs: RoundCosts, schedule: Schedule | None = None
    ) -> None:
        super().__init__(num_speculative_tokens, schedule)
        self._costs = costs
        self.measures_costs = isinstance(costs, MeasuredCosts)
        self._estimator = AcceptanceEstimator(num_speculative_tokens)
        self._histories: WeakKeyDictionary[Request, RequestHistory] = WeakKeyDictionary()
        self._plan: RoundPlan | None = None
        self._limits: list[int] = []
        self._probing = self._stops_early = self._whole_blocks = False
        self._allowance = MAX_ALLOWANCE  # in plain decoding steps

    def attach(self, proposer: Proposer, forward: Forward) -> None:
        self._costs.attach(proposer, forward)
        proposer.go_on, self._stops_early = self._go_on, proposer.stops_early
        self._whole_blocks = proposer.whole_blocks

    def limits(self, rows: Sequence[Request]) -> list[int]:
        room = super().limits(rows)
        self._plan, self._probing, self._limits = None, False, room
        if not max(room):
            return room
        histories = [self._histories.setdefault(request, RequestHistory()) for request in rows]
        plan = self._plan = RoundPlan(self._estimator, histories, room, *self._costs.of(rows))
        if plan.drafting_is_free():
            depth = max(room)
        elif self._stops_early and (plan.best_length or plan.next_draft_pays()):
            depth = max(room)  # `_go_on` stops the proposer
        else:
            depth = (0 if self._stops_early else plan.best_depth()) or self._probe(plan)
            if (
                self._whole_blocks
                and not self._stops_early
                and depth
                and plan.drafting_is_free(depth)
            ):
                depth = max(room)
        self._limits = [min(limit, depth) for limit in room]
        return self._limits

    def settle(self, proposal: Proposal) -> Proposal:
        plan = self._plan
        if (
            plan is None
            or plan.num_depths_seen
            or not proposal.width
            or proposal.parents is not None
        ):
            return proposal
        plan.limit_rows(proposal.counts)
        confidences = (
            None if proposal.confidence is None else proposal.confidence.T.tolist()
        )  # [width][B]
        if confidences is not None and proposal.foreseen:
            if not plan.decide_all(confidences):
                self._probe(plan)
            return proposal.shortened(plan.committed_length)
        for confidence in confidences or [None] * proposal.width:
            if not self._decide_next(plan, confidence, drafted=True):
                break
        return proposal.shortened(plan.committed_length)

    def learn(
        self,
        verified: Sequence[int],
        accepted: Sequence[int],
        draft_time: float,
        verify_time: float,
    ) -> None:
        plan = self._plan
        if plan is None:
            return
        verified = [min(count, limit) for count, limit in zip(verified, self._limits, strict=True)]
        depth = plan.num_depths_seen if self._stops_early else max(self._limits)
        width = max(verified)
        time = plan.relative_time(depth, width)
        self._allowance += PROBE_FRACTION * time
        if self._probing:
            self._allowance -= time - 1 - sum(accepted) / len(accepted)
        self._allowance = min(self._allowance, MAX_ALLOWANCE)
        self._costs.learn(len(verified), depth, width, draft_time, verify_time)
        self._estimator.learn(
            plan.state, plan.histories, verified, accepted, plan.confidence_available
        )

    def _go_on(self, confidence: Sequence[float]) -> int:
        assert self._plan is not None
        return self._decide_next(self._plan, confidence, drafted=False)

    def _decide_next(
        self, plan: RoundPlan, confidence: Sequence[float] | None, *, drafted: bool
    ) -> int:
        wanted = plan.decide_next(confidence, drafted=drafted)
        return wanted or (0 if plan.committed_length else self._probe(plan))

    def _probe(self, plan: RoundPlan) -> int:
        """The number of drafts to try although they are not expected to pay: 0 unless the allowance
        covers the loss of all of them."""
        drafts = plan.best_nonzero_length
        while drafts and plan.relative_time(drafts, drafts) - 1 > MAX_ALLOWANCE:
            drafts -= 1
        if not drafts or plan.relative_time(drafts, drafts) - 1 > self._allowance:
            return 0
        self._probing = True
        return plan.force(drafts)
