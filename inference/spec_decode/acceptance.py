"""What became of earlier drafts, over all requests, as moving means. Adaptive lengths expect more
of the same."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

Confidences = Sequence[Sequence[float]]  # [d][B]

KEPT = 0.98  # of what was counted, per round with drafts: means over some 50 rounds
# of the first depth; the others': the one before
PRIOR_ACCEPTANCE = 0.7
PRIOR_OUTCOMES = 4.0
MOST_LIKELY = 0.99  # no draft is surer


class Acceptance:
    """The acceptance to expect, by depth and by confidence.

    Depths that are not reached fade too, towards the depth before them, so that a length which was
    given up is tried again.

    idle_rounds   rounds in a row that verified no draft, though there was room"""

    def __init__(self, depth: int) -> None:
        # by depth, of all drafts that were reached
        self._accepted = [0.0] * depth
        self._reached = [0.0] * depth
        # of reached drafts with a known confidence: as many as were accepted, and as many as were
        # to be expected by the confidence alone
        self._confident_accepted = PRIOR_OUTCOMES
        self._confident_expected = PRIOR_OUTCOMES
        self.idle_rounds = inf  # nothing is known yet: drafts are tried

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
