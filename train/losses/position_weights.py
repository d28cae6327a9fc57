"""How much each draft of a chain counts in the loss, beside how far its distribution is from the
target's.

`step_decay` d: d^k at depth k = 0, 1, ..; `gamma` γ: exp(-k / γ); `uniform`: 1. These are of the
depth alone and are normalised to a sum of 1 over mean losses per depth. `d_pace` α (D-PACE, as in
vLLM's speculators): with q_k the drafter's probability of the data token and s_k = (1 - α) q_k + α,
depth k of a chain weighs Σ_{m >= k} Π_{i <= m} s_i, without a gradient; the sum over all terms is
divided by their number, not by the sum of weights, so that with a given learning rate its steps are
larger or smaller than those of the fixed weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.speculators.errors import ConfigError

KINDS = {"step_decay": "0 < d <= 1", "gamma": "γ > 0", "uniform": "true", "d_pace": "0 <= α <= 1"}


@dataclass(frozen=True)
class PositionWeights:
    """One kind of weights, as a recipe writes it under `position_weights:`, `{gamma: 4.0}`."""

    kind: str
    value: float

    @classmethod
    def parse(cls, section: Mapping[str, float | bool]) -> PositionWeights:
        """ConfigError names the key for an unknown kind or a value out of its range."""
        if len(section) != 1 or not section.keys() <= KINDS.keys():
            raise ConfigError(f"expected one of {', '.join(KINDS)}", where="position_weights")
        ((kind, value),) = section.items()
        fits = {
            "step_decay": 0 < value <= 1,
            "gamma": 0 < value < math.inf,
            "uniform": value is True,
            "d_pace": 0 <= value <= 1,
        }[kind]
        if not fits or (kind != "uniform" and isinstance(value, bool)):
            raise ConfigError(
                f"expected {KINDS[kind]}, got {value!r}", where=f"position_weights.{kind}"
            )
        return cls(kind, float(value))

    @property
    def measured(self) -> bool:
        """The weights depend on what the drafter says, chain by chain."""
        return self.kind == "d_pace"

    def of_depths(self, depths: int) -> Tensor:
        """[K] weights of the depths, with a sum of 1; equal ones where they are `measured`."""
        k = torch.arange(depths, dtype=torch.float64)
        if self.kind == "step_decay":
            weights = self.value**k
        elif self.kind == "gamma":
            weights = torch.exp(-k / self.value)
        else:
            weights = torch.ones_like(k)
        return (weights / weights.sum()).float()

    def of_chains(
        self, probabilities: Sequence[Tensor], anchors: Sequence[Tensor], size: int
    ) -> list[Tensor]:
        """Weights [N_k] of the terms of every depth, if they are `measured`.

        probabilities[k] [N_k]: q of the data token, 0 where the draft vocabulary lacks it;
        anchors[k] [N_k] long below `size`: the chain of each term, once per depth. A chain ends
        where it has no term."""
        first = probabilities[0]
        dtype = torch.float64 if first.dtype == torch.float64 else torch.float32
        smoothed = torch.ones(len(probabilities), size, dtype=dtype, device=first.device)  # [K, S]
        exists = torch.zeros_like(smoothed, dtype=torch.bool)
        for k, (q, anchor) in enumerate(zip(probabilities, anchors, strict=True)):
            smoothed[k, anchor] = (1 - self.value) * q.detach().to(dtype) + self.value
            exists[k].index_fill_(0, anchor, True)  # a number that is assigned would be uploaded
        exists = exists.cumprod(0).bool()  # and all depths before it
        products = torch.where(exists, smoothed, 1.0).cumprod(0) * exists
        weights = products.flip(0).cumsum(0).flip(0)  # sums over this depth and those after it
        return [row[anchor] for row, anchor in zip(weights, anchors, strict=True)]
