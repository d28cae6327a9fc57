"""Costs of a round: V(n), a forward of the target over n tokens per row, and D(k), drafting k
tokens per row. They are options, or measured before any request (engine/round_costs.py)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from draftsmith.speculators.errors import ConfigError


class RoundCosts(NamedTuple):
    """verify: V(w + 1), draft: D(w), for w = 0 … K drafts, in one unit."""

    verify: list[float]
    draft: list[float]


class CostsBySize:
    """Costs at some batch sizes, and between these on straight lines. Below the least and above the
    largest size they are as there: costs of one size are those of all."""

    def __init__(self, by_size: Mapping[int, RoundCosts]) -> None:
        self._sizes = sorted(by_size)
        self._verify = np.array([by_size[size].verify for size in self._sizes])  # [sizes, K+1]
        self._draft = np.array([by_size[size].draft for size in self._sizes])
        self._interpolated: dict[int, RoundCosts] = {}

    def of(self, rows: int) -> RoundCosts:
        """The costs of a round of so many rows."""
        if rows not in self._interpolated:
            self._interpolated[rows] = RoundCosts(
                self._between(rows, self._verify), self._between(rows, self._draft)
            )
        return self._interpolated[rows]

    def _between(self, rows: int, costs: np.ndarray) -> list[float]:
        return [float(np.interp(rows, self._sizes, of_length)) for of_length in costs.T]


def sizes_to_measure(most_rows: int) -> list[int]:
    """Batch sizes that are measured for all of 1 to `most_rows`, ascending: 1, 2, 4, …, and the
    last."""
    sizes = [1]
    while sizes[-1] < most_rows:
        sizes.append(min(2 * sizes[-1], most_rows))
    return sizes


def read_costs(costs: Mapping[str, Sequence[float]], k: int) -> RoundCosts:
    """`adaptive_verification_costs` of K drafts: {"verify": [V(1), …, V(K+1)], "draft": [D(1), …,
    D(K)]}. ConfigError for any other."""
    verify = list(costs.get("verify", ()))
    draft = list(costs.get("draft", ()))
    sound = all(0 <= cost < math.inf for cost in (*verify, *draft)) and min(verify, default=0)
    if (len(verify), len(draft)) != (k + 1, k) or not sound or len(costs) != 2:
        raise ConfigError(
            f"adaptive_verification_costs={dict(costs)}; expected verify, {k + 1} times above 0"
            f" of 1 to {k + 1} tokens per row, and draft, {k} times of 1 to {k} drafts"
        )
    return RoundCosts(verify, [0.0, *draft])
