"""DraftLength: the policy that plans rounds. Always K drafts, K by batch size, as many as pay now,
or those of the proposer that pays now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from typing_extensions import override

from draftsmith.inference.requests.request import Request
from draftsmith.inference.spec_decode.acceptance import Acceptance
from draftsmith.inference.spec_decode.costs import CostsBySize, RoundCosts, read_costs
from draftsmith.inference.spec_decode.gated_plan import GatedPlan
from draftsmith.inference.spec_decode.round_plan import AdaptivePlan, RoundPlan
from draftsmith.speculators.errors import ConfigError

Schedule = Sequence[tuple[int, int, int]]  # (smallest batch size, largest, K), ascending


class DraftLength:
    """As many drafts as there is room for, or as `schedule` says of the batch size, where 0 turns
    drafting off. No row has more than its request allows.

    needs_costs   `use_costs` is called before the first plan"""

    needs_costs: bool = False

    def __init__(self, num_speculative_tokens: int, schedule: Schedule | None = None) -> None:
        self.num_speculative_tokens = num_speculative_tokens
        self._schedule = schedule or ()

    @property
    def lacks_costs(self) -> bool:
        """True while a plan would need costs that `use_costs` has not given."""
        return False

    def plan(self, rows: Sequence[Request]) -> RoundPlan:
        """The plan of a round of these requests."""
        return RoundPlan(self._room(rows))

    def _room(self, rows: Sequence[Request]) -> list[int]:
        """The most drafts that each row may have."""
        tokens = self.num_speculative_tokens
        for smallest, _, scheduled in self._schedule:
            if smallest <= len(rows):  # a gap between two ranges belongs to the one below: vLLM's
                tokens = min(scheduled, self.num_speculative_tokens)
        return [min(tokens, request.draft_limit, request.most_drafts) for request in rows]

    def use_costs(self, costs: CostsBySize) -> None:
        """The costs of rounds in the engine that this policy plans for."""

    def forget(self) -> None:
        """Forgets what became of drafts; costs stay."""


class DraftLengthByCosts(DraftLength):
    """A policy that weighs drafts against their costs; `schedule` limits them too.

    costs   {"verify": [V(1), …, V(K+1)], "draft": [D(1), …, D(K)]} in any one unit, of all batch
            sizes, which makes its choices a function of the text alone; None: measured by the
            engine before its first request. ConfigError if they are not the costs of K drafts"""

    def __init__(
        self,
        num_speculative_tokens: int,
        costs: Mapping[str, Sequence[float]] | None = None,
        schedule: Schedule | None = None,
    ) -> None:
        super().__init__(num_speculative_tokens, schedule)
        self.needs_costs = costs is None
        self._costs: CostsBySize | None = None
        if costs is not None:
            self._costs = CostsBySize({1: read_costs(costs, num_speculative_tokens)})
        self._acceptance = Acceptance(num_speculative_tokens)

    @property
    @override
    def lacks_costs(self) -> bool:
        return self._costs is None

    def costs_of(self, rows: int) -> RoundCosts:
        """The costs of a round of so many rows. ConfigError if none were given or measured."""
        if self._costs is None:
            raise ConfigError(
                "rounds are planned by what they cost, and costs were neither given nor measured;"
                " call measure_costs for the engine first",
                where=type(self).__name__,
            )
        return self._costs.of(rows)

    @override
    def use_costs(self, costs: CostsBySize) -> None:
        self._costs = costs

    @override
    def forget(self) -> None:
        self._acceptance = Acceptance(self.num_speculative_tokens)


class AdaptiveDraftLength(DraftLengthByCosts):
    """The length that pays now, at most K."""

    @override
    def plan(self, rows: Sequence[Request]) -> RoundPlan:
        """ConfigError without costs."""
        costs = self.costs_of(len(rows))
        room = self._room(rows)
        if not any(room):
            return RoundPlan(room)
        return AdaptivePlan(self._acceptance, room, costs)


class GatedDraftLength(DraftLengthByCosts):
    """K drafts of a head, or those of the proposer beside it, whichever pays now."""

    def __init__(
        self,
        num_speculative_tokens: int,
        costs: Mapping[str, Sequence[float]] | None = None,
        schedule: Schedule | None = None,
    ) -> None:
        super().__init__(num_speculative_tokens, costs, schedule)
        self._beside = Acceptance(num_speculative_tokens)

    @override
    def plan(self, rows: Sequence[Request]) -> RoundPlan:
        """ConfigError without costs."""
        costs = self.costs_of(len(rows))
        return GatedPlan(self._beside, self._acceptance, self._room(rows), costs)

    @override
    def forget(self) -> None:
        super().forget()
        self._beside = Acceptance(self.num_speculative_tokens)
