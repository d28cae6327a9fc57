"""Times by width, as rounds tell them: a first measurement, and what every round says of it.

On a shared machine one round may take half as long again as the next, and a width that is used in a slow moment must
not look dear beside those that are not. So a round first moves all figures alike; what is particular to its width moves
it slowly, and its neighbours with it; and more tokens never take less time. Knows nothing of what is timed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

DRIFT = 0.03  # of what a round departs from its figure: what all figures follow
OWN, STEADY = 1.0, 12.0  # what its own width follows beside that: OWN / (STEADY + rounds of that width), LEAST of it
LEAST = 0.01
SHARE = 0.6  # of that, the next width's; and so on
WILD = 0.4  # a round further off than this (natural logarithm) counts as that far: a pause of the machine is no cost


class CostCurve:
    """first [n]: seconds for each width, above 0. Plain numbers: every round asks, of a dozen of them."""

    def __init__(self, first: Sequence[float]) -> None:
        self._log = [math.log(each) for each in first]
        self._rounds = [0] * len(first)

    def figures(self) -> list[float]:
        """[n] seconds, never falling."""
        up, down = accumulate(self._log, max), [*accumulate(reversed(self._log), min)]
        return [math.exp((most + least) / 2) for most, least in zip(up, reversed(down), strict=True)]

    def learn(self, place: int, found: float) -> None:
        """A round of that width took `found` seconds."""
        if found <= 0:
            return
        error = math.log(found) - self._log[place]
        if not any(self._rounds):  # what belongs to a round and to no forward: sampling, bookkeeping
            self._log = [each + error for each in self._log]
        else:
            error = min(max(error, -WILD), WILD)
            own = max(OWN / (STEADY + self._rounds[place]), LEAST)
            self._log = [
                each + error * (DRIFT + own * SHARE ** abs(other - place)) for other, each in enumerate(self._log)
            ]
        self._rounds[place] += 1
