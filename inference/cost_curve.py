"""Times by width, as rounds tell them: a first measurement, and what every round says of it.

On a shared machine one round may take half as long again as the next, and a width that is used in a slow moment must
not look dear beside those that are not. So a round first moves all figures alike; what is particular to its width moves
it slowly, and its neighbours with it; and more tokens never take less time. Knows nothing of what is timed.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

DRIFT = 0.03  # of what a round departs from its figure: what all figures follow
OWN, STEADY = 1.0, 12.0  # what its own width follows beside that: OWN / (STEADY + rounds of that width), LEAST of it
LEAST = 0.01
SHARE = 0.6  # of that, the next width's; and so on
WILD = 0.4  # a round further off than this (natural logarithm) counts as that far: a pause of the machine is no cost


class CostCurve:
    """first [n]: seconds for each width, above 0."""

    def __init__(self, first: Array) -> None:
        self._log: Array = np.log(first)
        self._rounds = [0] * len(first)
        places = np.arange(len(first))
        self._near: Array = SHARE ** np.abs(places[:, None] - places)  # [n, n]

    def figures(self) -> list[float]:
        """[n] seconds, never falling."""
        up, down = np.maximum.accumulate(self._log), np.minimum.accumulate(self._log[::-1])[::-1]
        return np.exp((up + down) / 2).tolist()

    def learn(self, place: int, found: float) -> None:
        """A round of that width took `found` seconds."""
        if found <= 0:
            return
        error = float(np.log(found) - self._log[place])
        if not any(self._rounds):  # what belongs to a round and to no forward: sampling, bookkeeping
            self._log += error
        else:
            error = min(max(error, -WILD), WILD)
            own = max(OWN / (STEADY + self._rounds[place]), LEAST)
            self._log += error * (DRIFT + own * self._near[place])
        self._rounds[place] += 1
