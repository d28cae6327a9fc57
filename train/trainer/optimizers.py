"""The optimizers of a recipe: AdamW, or Muon for matrices of layers and AdamW for the rest.

Muon (Jordan et al., https://kellerjordan.github.io/posts/muon) makes every update of a matrix
equally large in all of its directions. Heads are trained briefly and mostly matrices, and reach the
same acceptance in a fraction of the steps. Vocabulary projections, embeddings and norms stay with
AdamW, as its authors advise. `learning_rate` is the schedule; the loop scales every group's
`peak_lr` by it. `optimizer_state` is the part of a checkpoint: the state by the names of
parameters, gathered, so that it does not depend on the number of processes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from draftsmith.speculators.drafter import Drafter
from draftsmith.speculators.errors import CheckpointError
from draftsmith.train.recipe.sections import TrainingSection

BETAS = (0.9, 0.95)


def make_optimizers(
    drafter: Drafter,
    training: TrainingSection,
    others: Sequence[torch.nn.Parameter] = (),
    others_learning_rate: float | None = None,
) -> list[torch.optim.Optimizer]:
    """The optimizers of the drafter, and of `others` at their own rate; groups have a `peak_lr`."""
    matrices = []
    if training.optimizer == "muon":
        matrices = [p for p in drafter.weight_matrices() if p.ndim == 2 and p.requires_grad]
    for_muon = set(matrices)
    groups: list[dict[str, Any]] = [
        {"params": [p for p in drafter.trainable_parameters() if p not in for_muon]}
    ]
    if others:
        groups.append({"params": list(others), "lr": others_learning_rate})
    decay, optimizers = training.weight_decay, list[torch.optim.Optimizer]()
    if matrices:
        rate = training.muon_learning_rate
        optimizers.append(torch.optim.Muon(matrices, lr=rate, momentum=0.95, weight_decay=decay))
    rate = training.learning_rate
    adam = torch.optim.AdamW(groups, lr=rate, betas=BETAS, weight_decay=decay, fused=True)
    optimizers.append(adam)
    for group in param_groups(optimizers):
        group["peak_lr"] = group["lr"]
    return optimizers


def param_groups(optimizers: Sequence[torch.optim.Optimizer]) -> list[dict[str, Any]]:
    return [group for optimizer in optimizers for group in optimizer.param_groups]


def step_if_finite(optimizers: Sequence[torch.optim.Optimizer], norm: Tensor) -> None:
    """One step, or none if `norm` [], that of all gradients, is not finite: weights, moments and
    step counts then stay as they are. Only shards wait for the device."""
    finite = norm.isfinite()
    for optimizer in optimizers:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if any(isinstance(p, DTensor) for p in parameters):
            if finite:
                optimizer.step()
        elif isinstance(optimizer, torch.optim.Muon):
            _step_or_undo(optimizer, parameters, finite)
        else:
            optimizer.found_inf = (~finite).float()  # type: ignore[attr-defined]  # its kernel looks at it
            optimizer.step()


def _step_or_undo(
    optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor], finite: Tensor
) -> None:
    """A step that is undone on the device where `finite` [] is false."""
    weights = [p.detach().clone() for p in parameters]
    moments = [{name: t.clone() for name, t in optimizer.state[p].items()} for p in parameters]
    optimizer.step()
    with torch.no_grad():
        for p, weight, before in zip(parameters, weights, moments, strict=True):
            p.copy_(torch.where(finite, p, weight))
            for name, moment in optimizer.state[p].items():
                old = before.get(name, torch.zeros_like(moment))
                moment.copy_(torch.where(finite, moment, old))


def optimizer_state(
    modules: nn.Module, optimizers: Sequence[torch.optim.Optimizer]
) -> dict[str, Any]:
    """The state by the names of the parameters in `modules`, whole and in the host's memory; on
    several processes the first one's is filled. All processes must call it at the same time."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return get_optimizer_state_dict(modules, optimizers, options=options)


def load_optimizer_state(
    modules: nn.Module, optimizers: Sequence[torch.optim.Optimizer], saved: dict[str, Any]
) -> None:
    """Loads the result of `optimizer_state`, which every process has, into optimizers of the same
    parameters; CheckpointError for others."""
    options = StateDictOptions(full_state_dict=True)
    try:
        set_optimizer_state_dict(modules, optimizers, saved, options=options)
    except (KeyError, RuntimeError) as error:
        raise CheckpointError(
            f"the optimizer's parameters are not those of the checkpoint: {error}"
        ) from error


def learning_rate(training: TrainingSection, share: float, total_steps: int | None) -> float:
    """Linear warm-up over `warmup_ratio`, then cosine to zero. `share`: 0 to 1, of the budget
    before this step; `total_steps`: None for time, whose first step has a hundredth of the peak."""
    peak, warm_up = training.learning_rate, training.warmup_ratio
    if share < warm_up:
        following = share + 1 / total_steps if total_steps else max(share, 0.01 * warm_up)
        return peak * min(1.0, following / warm_up)
    after = (share - warm_up) / max(1 - warm_up, 1e-9)
    return peak * 0.5 * (1 + math.cos(math.pi * min(after, 1.0)))
