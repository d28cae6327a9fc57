"""AdaptiveTreeBudget: how many places of a growing tree are verified, by what each gains and what
it costs.

With B rows that share one forward, a round that verifies w places per row commits B tokens and one
more for every place that is accepted, and takes V(w + 1) + D. A place is accepted with the
probability of its path as the drafter sees it, times κ: what was accepted of late over what was
expected. The tree takes in the place of the next highest probability while some number of further
places gains more tokens than ρ times their time (Dinkelbach 1967, as in round_plan.py); ρ is what
rounds of late gained, and at least what plain decoding does. Trees are grown in tree_drafting.py,
which is told the prices ρ V(w + 1) / κ before the round; no token is seen here."""

from __future__ import annotations

from collections.abc import Sequence

from inference.requests.request import Request
from inference.spec_decode.draft_length.costs import Forward, RoundCosts
from inference.spec_decode.draft_length.policy import DraftLength, Schedule
from inference.spec_decode.proposal import Proposal
from inference.spec_decode.proposers.base import Proposer

DECAY = 0.98  # of what a round tells of ρ and κ, per round
PRIOR_ROUNDS = 4.0  # rounds of plain decoding that ρ begins with
PRIOR_PLACES = 4.0  # places accepted and expected that κ begins with, and always counts


class AdaptiveTreeBudget(DraftLength):
    """As many places as pay, `num_speculative_tokens` at most, and at least one. Whole trees are
    drafted; `costs`: of their D only the last is read."""

    def __init__(
        self, num_speculative_tokens: int, costs: RoundCosts, schedule: Schedule | None = None
    ) -> None:
        super().__init__(num_speculative_tokens, schedule)
        self._costs = costs
        self._tokens = self._steps = (
            PRIOR_ROUNDS  # committed per row, and plain decoding steps that they took
        )
        self._accepted = self._expected = self._expected_now = 0.0  # places, of all rows
        self._relative_time: list[
            float
        ] = []  # of a round that verifies 0 … K places, in plain decoding steps

    def attach(self, proposer: Proposer, forward: Forward) -> None:
        self._costs.attach(proposer, forward)
        self._proposer = proposer

    @property
    def gain(self) -> float:
        """Tokens per time over those of plain decoding, of late."""
        return self._tokens / self._steps

    @property
    def calibration(self) -> float:
        """κ, places accepted over places expected, of late."""
        return (self._accepted + PRIOR_PLACES) / (self._expected + PRIOR_PLACES)

    def limits(self, rows: Sequence[Request]) -> list[int]:
        limits, self._relative_time = super().limits(rows), []
        if max(limits):
            verify, draft = self._costs.of(rows)
            self._relative_time = [(cost + draft[-1]) / verify[0] for cost in verify]
            rate = max(self.gain, 1.0) * len(rows) / verify[0]  # ρ
            self._proposer.place_prices = [rate * cost / self.calibration for cost in verify]
        return limits

    def settle(self, proposal: Proposal) -> Proposal:
        self._expected_now = proposal.expected or 0.0
        return proposal

    def learn(
        self,
        verified: Sequence[int],
        accepted: Sequence[int],
        draft_time: float,
        verify_time: float,
    ) -> None:
        if not self._relative_time:
            return
        rows, width = len(verified), max(verified)
        self._tokens = DECAY * self._tokens + 1 + sum(accepted) / rows
        self._steps = DECAY * self._steps + self._relative_time[width]
        self._accepted = DECAY * self._accepted + sum(accepted)
        self._expected = DECAY * self._expected + self._expected_now
        self._costs.learn(rows, self.num_speculative_tokens, width, draft_time, verify_time)
