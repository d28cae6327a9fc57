"""The loss of a batch: the drafter's unroll, and one chunked objective over all its depths.

The loss of a step is sum_k w_k L_k / sum_k w_k with L_k a mean over every valid term of depth k in
the whole step: all processes and all accumulated batches. So a batch is told what each of its terms
weighs (`StepLoss.term_weights`), and the losses of the batches add up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from accelerate import Accelerator
from torch import Tensor

from draftsmith.speculators.drafter import Drafter, DraftStep
from draftsmith.speculators.precision import on_host, to_device
from draftsmith.speculators.target.frozen_target import TargetFeatures
from draftsmith.speculators.target.target_head import TargetHead
from draftsmith.speculators.vocab.draft_vocab import to_draft_ids
from draftsmith.train.losses.objective import (
    Loss,
    StepMetrics,
    chunked_objective,
    confidence_objective,
    in_loop_lengths,
)
from draftsmith.train.losses.position_weights import PositionWeights
from draftsmith.train.recipe.recipe import Recipe
from draftsmith.train.trainer.joint_target import JointTarget

CROSS_ENTROPY: Loss = {"cross_entropy": 1.0}
Within = Callable[[str], None]  # is told what a step computes


class StepLoss:
    """The recipe's loss of a drafter over K depths; of a target that trains with it as well."""

    def __init__(
        self,
        recipe: Recipe,
        target: TargetHead,
        drafter: Drafter,
        *,
        accelerator: Accelerator,
        joint: JointTarget | None,
        within: Within,
    ) -> None:
        self.mix = recipe.loss
        self.target = target
        self.drafter = drafter
        self.accelerator = accelerator
        self.joint = joint
        self.within = within
        trained = recipe.drafter.unroll_steps
        depths = min(trained, drafter.max_depth or trained)
        self.position = PositionWeights.parse(recipe.position_weights)
        self.depth_weights = self.position.of_depths(depths).to(accelerator.device)  # [K]
        self.chunk_size: int | None = None  # of the objective; None: by device and vocabulary

    @property
    def depths(self) -> int:
        """K."""
        return len(self.depth_weights)

    def term_weights(self, counts: Tensor) -> Tensor:
        """[K] weight of a term of each depth. `counts`: terms of each depth [K] in the whole
        step."""
        if self.position.measured:  # normalised over all terms
            return (1 / counts.sum().clamp(min=1)).float().expand(len(counts))
        return (self.depth_weights / counts.clamp(min=1)).float()

    def __call__(
        self, features: TargetFeatures, term_weights: Tensor, supervised: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The loss of one batch [], and sums over its terms, float32 [2K + 3]: alpha [K], terms
        whose argmax is the target's [K], in-loop acceptance lengths and the anchors they were
        measured at, and the loss. `supervised`: tokens of the step that a target trained jointly
        has a loss on."""
        with self.accelerator.autocast():
            steps = []
            for depth in self.drafter.unroll(features, self.depths):
                steps.append(depth)
                self.within(f"depth {len(steps)} of {self.depths}")
            if self.position.measured:
                steps = self.weighed(features, steps)
            self.within("the loss")
            loss, parts = self.objectives(features, steps, term_weights)
            if self.joint is not None and supervised is not None:
                loss = loss + self.joint.loss(features, supervised)
        slots = features.input_ids.numel()
        lengths = in_loop_lengths([p.alpha for p in parts], [s.anchor_index for s in steps], slots)
        sums = [part.alpha.sum() for part in parts] + [part.agreement.sum() for part in parts]
        return loss, torch.stack([part.detach().float() for part in (*sums, *lengths, loss)])

    def objectives(
        self, features: TargetFeatures, steps: Sequence[DraftStep], scales: Tensor
    ) -> tuple[Tensor, list[StepMetrics]]:
        """The loss over terms of several depths, each weighted by its depth's of `scales` [K], for
        every trained head; the metrics of each depth under the head that drafts."""
        losses = []
        for trained in self.drafter.trained_heads(self.mix):
            loss, parts = self._over_depths(features, steps, scales, trained.head, trained.loss)
            losses.append(loss)
        weight = self.drafter.traits.confidence_loss
        if weight:
            for step, part in zip(steps, parts, strict=True):
                logits = self.drafter.confidence(step.hidden)
                sure = confidence_objective(logits, part.alpha, step.weight * scales[step.depth])
                losses.append(weight * sure)
        return sum(losses), parts

    def weighed(self, features: TargetFeatures, steps: Sequence[DraftStep]) -> list[DraftStep]:
        """The steps under position weights that depend on what the drafter says of each chain."""
        ones = torch.ones_like(self.depth_weights)
        size = features.input_ids.numel()
        head = self.drafter.trained_heads(self.mix)[0].head
        with torch.no_grad():
            _, parts = self._over_depths(features, steps, ones, head, CROSS_ENTROPY)
        labels = features.input_ids.flatten().roll(-1)
        probabilities = []
        for step, part in zip(steps, parts, strict=True):
            drafted = to_draft_ids(labels[step.target_index], self.drafter.draft_to_target)
            probabilities.append((-part.loss).exp() * (drafted >= 0))
        weights = self.position.of_chains(probabilities, [s.anchor_index for s in steps], size)
        return [
            replace(step, weight=step.weight * w) for step, w in zip(steps, weights, strict=True)
        ]

    def _over_depths(
        self,
        features: TargetFeatures,
        steps: Sequence[DraftStep],
        scales: Tensor,
        head: Callable[..., Tensor],
        loss: Loss,
    ) -> tuple[Tensor, list[StepMetrics]]:
        """The loss of one head and the metrics of each depth; depths read alike are one call."""
        losses = []
        parts = []
        for group in [steps] if self.drafter.traits.one_head else [[step] for step in steps]:
            known = torch.cat([on_host(s.target_index) for s in group])  # [N] of these depths
            index = to_device(known, features.input_ids.device)
            total, metrics = chunked_objective(
                torch.cat([s.hidden for s in group]),  # [N, D]
                lambda hidden, depth=group[0].depth: head(hidden, depth),
                features.last_hidden.flatten(0, 1),
                self.target.logits,
                torch.cat([s.weight * scales[s.depth] for s in group]),
                labels=features.input_ids.flatten().roll(-1)[index],
                loss=loss,
                draft_to_target=self.drafter.draft_to_target,
                chunk_size=self.chunk_size,
                target_index=index,
            )
            losses.append(total)
            parts += metrics.split([len(s.hidden) for s in group])
        return sum(losses), parts
