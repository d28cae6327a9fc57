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
from draftsmith.speculators.precision import multiplies_bfloat16
from draftsmith.train.recipe.sections import RunTraining

BETAS = (0.9, 0.95)
# Numbers in the matrices that Muon steps together; larger ones keep a device busy alone.
BATCH = 1 << 24


def muon_matrices(drafter: Drafter) -> list[nn.Parameter]:
    """The parameters that Muon takes. A row or a column is no matrix: it has one direction, and an
    orthogonalised step of it would have the same size whatever its gradient."""
    weights = (p for p in drafter.weight_matrices() if p.ndim == 2 and p.requires_grad)
    return [p for p in weights if min(p.shape) > 1]


def make_optimizers(
    drafter: Drafter,
    training: RunTraining,
    others: Sequence[torch.nn.Parameter] = (),
    others_learning_rate: float | None = None,
) -> list[torch.optim.Optimizer]:
    """The optimizers of the drafter, and of `others` at their own rate; groups have a `peak_lr`."""
    matrices = muon_matrices(drafter) if training.optimizer == "muon" else []
    for_muon = set(matrices)
    groups: list[dict[str, Any]] = [
        {"params": [p for p in drafter.trainable_parameters() if p not in for_muon]}
    ]
    if others:
        groups.append({"params": list(others), "lr": others_learning_rate})
    decay = training.weight_decay
    optimizers = list[torch.optim.Optimizer]()
    if matrices:
        rate = training.muon_learning_rate
        optimizers.append(Muon(matrices, lr=rate, momentum=0.95, weight_decay=decay))
    rate = training.learning_rate
    adam = torch.optim.AdamW(groups, lr=rate, betas=BETAS, weight_decay=decay, fused=True)
    optimizers.append(adam)
    for group in param_groups(optimizers):
        group["peak_lr"] = group["lr"]
    return optimizers


def param_groups(optimizers: Sequence[torch.optim.Optimizer]) -> list[dict[str, Any]]:
    """The groups of all optimizers, in their order."""
    return [group for optimizer in optimizers for group in optimizer.param_groups]


class Muon(torch.optim.Muon):
    """torch's Muon, whose step does nothing where `found_inf` [] is 1, without waiting for the
    device: the protocol of fused AdamW and of GradScaler. None: the step is taken. Small matrices
    of one shape are stepped together. Shards may be of any shape, and fewer rows than processes."""

    found_inf: Tensor | None = None

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # nobody has a closure
        """One step of every matrix."""
        for group in self.param_groups:
            for parameters in in_batches(group["params"]):
                self._step_batch(parameters, group)

    def _step_batch(self, parameters: Sequence[Tensor], group: dict[str, Any]) -> None:
        """One step of matrices of one shape. The momentum stands in for a gradient that is not
        finite: their mean is the momentum as it was, and the update that follows is finite. It is
        then multiplied with 0."""
        buffers = [self._momentum(p) for p in parameters]
        buffer = stacked(buffers)
        gradient = stacked([_gradient(p) for p in parameters])
        momentum = group["momentum"]
        taken: Tensor | float = 1.0
        if self.found_inf is not None:
            gradient = torch.where(self.found_inf > 0, buffer, gradient)
            taken = 1 - self.found_inf
        buffer.lerp_(gradient, 1 - momentum)
        update = orthogonalised(gradient.lerp(buffer, momentum)) * taken
        rows, columns = parameters[0].shape
        rate = group["lr"] * math.sqrt(max(1, rows / columns))
        decay = 1 - taken * (group["lr"] * group["weight_decay"])
        if len(parameters) == 1:
            _apply(parameters[0], update, decay, rate)
            return
        torch._foreach_copy_(buffers, list(buffer.unbind()))
        torch._foreach_mul_(parameters, decay)
        updates = update.to(parameters[0].dtype).unbind()
        torch._foreach_add_(parameters, list(updates), alpha=-rate)

    def _momentum(self, p: Tensor) -> Tensor:
        """Of a matrix, zeros before its first step."""
        state = self.state[p]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(p)
        return state["momentum_buffer"]


def in_batches(matrices: Sequence[Tensor]) -> list[list[Tensor]]:
    """Matrices that are stepped together: small ones of one shape and dtype. Shards stand alone."""
    batches: list[list[Tensor]] = []
    open_batches: dict[Any, list[Tensor]] = {}  # those that may still grow
    for p in matrices:
        key = (p.shape, p.dtype)
        batch = open_batches.get(key)
        if batch is None or isinstance(p, DTensor) or (len(batch) + 1) * p.numel() > BATCH:
            batch = []
            batches.append(batch)
            open_batches[key] = batch
        batch.append(p)
    return batches


def stacked(tensors: Sequence[Tensor]) -> Tensor:
    """[A, B] of one tensor, the same; [n, A, B] of several, a copy."""
    return tensors[0] if len(tensors) == 1 else torch.stack(list(tensors))


def _gradient(p: Tensor) -> Tensor:
    assert p.grad is not None, "the loop fills every gradient"
    return p.grad


def _apply(p: Tensor, update: Tensor, decay: Tensor | float, rate: float) -> None:
    if isinstance(p, DTensor) and isinstance(update, DTensor):
        update = update.redistribute(placements=p.placements)
    p.mul_(decay)
    p.add_(update, alpha=-rate)


def orthogonalised(matrix: Tensor) -> Tensor:
    """[A, B] or [n, A, B] -> the same shape in bfloat16, with the same singular vectors and
    singular values near 1: five Newton-Schulz iterations (Jordan et al., as in torch.optim.Muon,
    which keeps them private). In float32 on a CPU without bfloat16 instructions, where the products
    would take most of a step."""
    tall = matrix.shape[-2] > matrix.shape[-1]
    add_product = torch.addmm if matrix.ndim == 2 else torch.baddbmm
    x = matrix.bfloat16() if multiplies_bfloat16(matrix.device) else matrix.float()
    if tall:
        x = x.mT
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.mT
        polynomial = add_product(gram, gram, gram, beta=-4.7750, alpha=2.0315)
        x = add_product(x, polynomial, x, beta=3.4445)
    return x.mT if tall else x


def step_if_finite(optimizers: Sequence[torch.optim.Optimizer], norm: Tensor) -> None:
    """One step, or none if `norm` [], that of all gradients, is not finite: weights, moments and
    step counts then stay as they are. Only shards wait for the device."""
    finite = norm.isfinite()
    for optimizer in optimizers:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if not any(isinstance(p, DTensor) for p in parameters):
            set_found_inf(optimizer, finite)
            optimizer.step()
        elif finite:
            optimizer.step()


def set_found_inf(optimizer: torch.optim.Optimizer, finite: Tensor) -> None:
    """torch.amp.GradScaler's word to an optimizer that looks at it on the device, as fused AdamW
    and `Muon` do: with `found_inf` of 1 the next step changes nothing."""
    optimizer.found_inf = (~finite).float()  # type: ignore[attr-defined]


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


def learning_rate(
    training: RunTraining, share: float, total_steps: int | None, begun: float = 0.0
) -> float:
    """Linear warm-up over `warmup_ratio`, then cosine to zero. `share`: 0 to 1, of the budget
    before this step; `total_steps`: None for time, whose first step has a hundredth of the peak;
    `begun`: the share before the first step, which a fitted start has taken of the time."""
    peak = training.learning_rate
    warm_up = training.warmup_ratio
    since = share - begun
    if since < warm_up:
        following = since + 1 / total_steps if total_steps else max(since, 0.01 * warm_up)
        return peak * min(1.0, following / warm_up)
    after = (since - warm_up) / max(1 - begun - warm_up, 1e-9)
    return peak * 0.5 * (1 + math.cos(math.pi * min(after, 1.0)))
