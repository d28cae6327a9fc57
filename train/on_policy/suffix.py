"""The terms of a step that lie in rejected suffixes: which they are, what they weigh, how they are told from the rest.

Of a round that rejected draft d_n, the depths that read d_n, d_{n+1}, .. match the target's states after those tokens:
text that nobody will ever see, but states that the drafter comes into whenever it errs. They have a loss and a
normaliser of their own (Draft-OPD, arXiv 2605.29343). Knows no family and no divergence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from speculators.drafter import DraftStep, term_paths


def branch_weights(batch: Any, decay: float) -> Tensor | None:
    """[B, T]: decay**j of the j-th token of a branch, counted from 0, and 0 of every other token; None for rows
    without branches."""
    forks = getattr(batch, "forks", None)
    if forks is None:
        return None
    place = batch.position_ids - batch.position_ids.gather(1, forks.clamp(min=0)) - 1
    return torch.where(forks >= 0, decay ** place.clamp(min=0), 0.0)


def count_suffix(batch: Any, depths: int, decay: float) -> Tensor:
    """[K + 1]: terms in suffixes of each depth of a batch, and Σ decay**j over all of them; before any unroll."""
    weights, found = branch_weights(batch, decay), torch.zeros(depths + 1, device=batch.segment_ids.device)
    if weights is None:
        return found
    for depth in range(depths):
        valid, path = term_paths(batch, depth)
        terms = weights.gather(1, path)[valid]
        found[depth] = (terms > 0).sum()
        found[depths] += terms.sum()
    return found


def split(steps: Sequence[DraftStep], weights: Tensor | None) -> tuple[list[DraftStep], list[DraftStep]]:
    """(the main terms of each depth, those in suffixes with `weights` [B, T] of their targets; none of either's)."""
    if weights is None:
        return list(steps), []
    main, rejected = [], []
    for step in steps:
        decayed = weights.flatten()[step.target_index]  # [N]
        inside = decayed > 0
        main.append(_of(step, ~inside))
        if bool(inside.any()):
            rejected.append(replace(_of(step, inside), weight=decayed[inside]))
    return main, rejected


def _of(step: DraftStep, chosen: Tensor) -> DraftStep:
    """The chosen terms of a depth."""
    fields = ("hidden", "target_index", "anchor_index", "weight")
    return replace(step, **{name: getattr(step, name)[chosen] for name in fields})
