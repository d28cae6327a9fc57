"""The optimizer of a recipe: AdamW, or Muon for the matrices of the layers with AdamW for the rest.

Muon (Jordan et al., https://kellerjordan.github.io/posts/muon) makes every update of a matrix equally large in all of
its directions. Heads are trained briefly and mostly matrices, and reach the same acceptance in a fraction of the
steps. Vocabulary projections, embeddings and norms stay with AdamW, as its authors advise.
Knows nothing of schedules: a group's `peak_lr` is what the loop scales.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from speculators.drafter import Drafter
from train.recipe.sections import TrainingSection
from train.trainer.parallel import like_shards, whole


class GatheredMuon(torch.optim.Muon):
    """Muon of sharded matrices. An update needs the whole of a matrix: each in turn is gathered with its gradient and
    momentum, stepped as one process would, and its shards kept."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            options = {key: value for key, value in group.items() if key not in ("params", "peak_lr")}
            for shards in group["params"]:
                gathered = torch.nn.Parameter(whole(shards.detach()))
                assert shards.grad is not None
                gathered.grad = whole(shards.grad)
                alone = torch.optim.Muon([gathered], **options)
                alone.state[gathered] = {key: whole(value) for key, value in self.state[shards].items()}
                alone.step()
                shards.copy_(like_shards(gathered.detach(), shards))
                self.state[shards] = {key: like_shards(value, shards) for key, value in alone.state[gathered].items()}


class Together:
    """Several optimizers over disjoint parameters, used as one."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self.optimizers = optimizers

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def step(self, closure: Callable | None = None) -> None:
        for optimizer in self.optimizers:
            optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return {"optimizers": [optimizer.state_dict() for optimizer in self.optimizers]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)


def make_optimizer(
    drafter: Drafter,
    training: TrainingSection,
    others: Sequence[torch.nn.Parameter] = (),
    others_learning_rate: float | None = None,
) -> torch.optim.Optimizer | Together:
    """For the drafter's trainable parameters, and `others` at a rate of their own; every group has its `peak_lr`."""
    parameters, matrices = drafter.trainable_parameters(), []
    if training.optimizer == "muon":
        matrices = _matrices(drafter)
    chosen = {id(p) for p in matrices}
    groups: list[dict[str, Any]] = [{"params": [p for p in parameters if id(p) not in chosen]}]
    if others:
        groups.append({"params": list(others), "lr": others_learning_rate or training.learning_rate})
    adam = torch.optim.AdamW(
        groups,
        lr=training.learning_rate,
        betas=tuple(training.betas),
        weight_decay=training.weight_decay,
    )
    optimizer: torch.optim.Optimizer | Together = adam
    if matrices:
        sharded = isinstance(matrices[0], DTensor)
        muon = (GatheredMuon if sharded else torch.optim.Muon)(
            matrices, lr=training.muon_learning_rate, momentum=0.95, weight_decay=training.weight_decay
        )
        optimizer = Together(muon, adam)
    for group in optimizer.param_groups:
        group["peak_lr"] = group["lr"]
    return optimizer


def _matrices(drafter: Drafter) -> list[torch.nn.Parameter]:
    """What Muon is for: two-dimensional weights that are neither an embedding nor read by the output head."""
    return [p for p in drafter.weight_matrices() if p.ndim == 2 and p.requires_grad]
