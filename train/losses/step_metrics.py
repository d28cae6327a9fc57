"""What a training step measures for free while its loss is computed: acceptance, agreement, in-loop expected
length.

These numbers are for watching a run. This module knows no runtime and no replay: `inference` owns acceptance
length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class StepMetrics:
    """What one call measured, row by row in the order of `hidden`; nothing here carries a gradient."""

    loss: Tensor  # [N] float, weight * D
    alpha: Tensor  # [N] float, sum_v min(p, q): teacher-forced acceptance probability
    agreement: Tensor  # [N] bool, the drafter's argmax is the target's (over the full vocabulary)

    @property
    def count(self) -> int:
        """Rows, whatever their weight."""
        return self.alpha.shape[0]

    @property
    def loss_sum(self) -> Tensor:
        return self.loss.sum()

    @property
    def alpha_sum(self) -> Tensor:
        return self.alpha.sum()

    @property
    def agreement_sum(self) -> Tensor:
        return self.agreement.sum()

    def split(self, sizes: Sequence[int]) -> list[StepMetrics]:
        """Back into depths, when the rows of several depths were concatenated for one call."""
        parts = zip(self.loss.split(sizes), self.alpha.split(sizes), self.agreement.split(sizes), strict=True)
        return [StepMetrics(*part) for part in parts]


def in_loop_lengths(alphas: Sequence[Tensor], anchors: Sequence[Tensor], size: int | None = None) -> Tensor:
    """[2] float64: 1 + sum_k prod_{j<=k} alpha_j summed over the anchors of depth 0, and their number.

    Both add up over batches; their ratio is a number to watch, not the runtime's. alphas[k] [N_k]: acceptance at depth
    k; anchors[k] [N_k] long: the anchor of each, unique within a depth. A chain ends at the first depth where its
    anchor has no row (its document ended). `size`: all anchors are below it; None looks for the largest, which waits
    for the device.
    """
    if not alphas or alphas[0].numel() == 0:
        return torch.zeros(2, dtype=torch.float64, device=alphas[0].device if alphas else None)
    size = int(torch.cat(list(anchors)).max()) + 1 if size is None else size
    joint = torch.ones(size, dtype=torch.float64, device=alphas[0].device)  # [anchors], prefix product
    total = torch.zeros_like(joint)
    for alpha, anchor in zip(alphas, anchors, strict=True):
        accepted = torch.zeros_like(joint)
        accepted[anchor] = alpha.to(joint.dtype)
        joint = joint * accepted
        total = total + joint
    return torch.stack([(1.0 + total[anchors[0]]).sum(), total.new_tensor(float(len(anchors[0])))])
