"""The optimizer of a recipe: AdamW, or Muon for the matrices of the layers with AdamW for the rest.

Muon (Jordan et al., https://kellerjordan.github.io/posts/muon) makes every update of a matrix
equally large in all of its directions. Heads are trained briefly and mostly matrices, and reach the
same acceptance in a fraction of the steps. Vocabulary projections, embeddings and norms stay with
AdamW, as its authors advise. `learning_rate` is the schedule; the loop scales every group's
`peak_lr` by it. `optimizer_state` is the part of a checkpoint: the state by the names of
parameters, gathered, so that it does not depend on the number of processes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from speculators.drafter import Drafter
from speculators.errors import CheckpointError
from train.recipe.sections import TrainingSection
from train.trainer.parallel import like_shards, whole

FUSED_DEVICES = frozenset({"cpu", "cuda", "mps", "xpu"})
HOW = (
    "fused",
    "foreach",
)  # options of an optimizer that change its speed: a checkpoint's are not taken over


class GatheredMuon(torch.optim.Muon):
    """Muon of sharded matrices. An update needs the whole of a matrix: each in turn is gathered
    with its gradient and momentum, stepped as one process would, and its shards kept."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            options = {
                key: value for key, value in group.items() if key not in ("params", "peak_lr")
            }
            for shards in group["params"]:
                gathered = torch.nn.Parameter(whole(shards.detach()))
                assert shards.grad is not None
                gathered.grad = whole(shards.grad)
                alone = torch.optim.Muon([gathered], **options)
                alone.state[gathered] = {
                    key: whole(value) for key, value in self.state[shards].items()
                }
                alone.step()
                shards.copy_(like_shards(gathered.detach(), shards))
                self.state[shards] = {
                    key: like_shards(value, shards) for key, value in alone.state[gathered].items()
                }


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


def make_optimizer(
    drafter: Drafter,
    training: TrainingSection,
    others: Sequence[torch.nn.Parameter] = (),
    others_learning_rate: float | None = None,
) -> torch.optim.Optimizer | Together:
    """The optimizer of the drafter's trainable parameters, and of `others` at their own rate; every
    group has its `peak_lr`."""
    matrices = []
    if (
        training.optimizer == "muon"
    ):  # for two-dimensional weights that are neither embedding nor output head
        matrices = [p for p in drafter.weight_matrices() if p.ndim == 2 and p.requires_grad]
    for_muon = {id(p) for p in matrices}
    groups: list[dict[str, Any]] = [
        {"params": [p for p in drafter.trainable_parameters() if id(p) not in for_muon]}
    ]
    if others:
        groups.append(
            {"params": list(others), "lr": others_learning_rate or training.learning_rate}
        )
    parameters = [parameter for group in groups for parameter in group["params"]]
    adam = torch.optim.AdamW(
        groups,
        lr=training.learning_rate,
        betas=tuple(training.betas),
        weight_decay=training.weight_decay,
        **implementation(parameters),
    )
    optimizer: torch.optim.Optimizer | Together = adam
    if matrices:
        sharded = isinstance(matrices[0], DTensor)
        muon = (GatheredMuon if sharded else torch.optim.Muon)(
            matrices,
            lr=training.muon_learning_rate,
            momentum=0.95,
            weight_decay=training.weight_decay,
        )
        optimizer = Together(muon, adam)
    for group in optimizer.param_groups:
        group["peak_lr"] = group["lr"]
    return optimizer


def implementation(parameters: Sequence[Tensor]) -> dict[str, bool]:
    """How AdamW updates these parameters: in one kernel (fused) where torch has it for their
    devices, else by a few operations over lists of them (foreach)."""
    kinds = {parameter.device.type for parameter in parameters}
    fused = kinds <= FUSED_DEVICES and all(
        parameter.is_floating_point() for parameter in parameters
    )
    return {"fused": True} if fused else {"foreach": True}


Names = Mapping[str, nn.Parameter]  # of all trained parameters, "drafter.fc.weight" and the like


def optimizer_state(optimizer: Any, names: Names) -> dict[str, Any]:
    """{"state": {parameter: {key: tensor}}, "groups": [{"params": [parameter], option: value}]}, in
    the host's memory.

    All processes must call it at the same time.
    """
    name_of = {id(parameter): name for name, parameter in names.items()}
    state, groups = {}, []
    for single in optimizers_in(optimizer):
        for parameter, values in single.state.items():
            state[name_of[id(parameter)]] = {
                key: whole(value).detach().cpu().clone() if isinstance(value, Tensor) else value
                for key, value in values.items()
            }
        for group in single.param_groups:
            groups.append(
                {**group, "params": [name_of[id(parameter)] for parameter in group["params"]]}
            )
    return {"state": state, "groups": groups}


def load_optimizer_state(optimizer: Any, saved: Mapping[str, Any], names: Names) -> None:
    """Loads the result of `optimizer_state` into an optimizer of the same groups; CheckpointError
    for other groups."""
    name_of, first = {id(parameter): name for name, parameter in names.items()}, 0
    for single in optimizers_in(optimizer):
        mine = saved["groups"][first : first + len(single.param_groups)]
        first += len(single.param_groups)
        wanted = [[name_of[id(p)] for p in group["params"]] for group in single.param_groups]
        if wanted != [group["params"] for group in mine]:
            raise CheckpointError("the optimizer's parameters are not those of the checkpoint")
        parameters = [parameter for group in single.param_groups for parameter in group["params"]]
        number = {id(parameter): i for i, parameter in enumerate(parameters)}
        state = {
            number[id(parameter)]: {
                key: like_shards(value, parameter) if isinstance(value, Tensor) else value
                for key, value in saved["state"][name_of[id(parameter)]].items()
            }
            for parameter in parameters
            if name_of[id(parameter)] in saved["state"]
        }
        groups = [
            {
                **group,
                **{key: own[key] for key in HOW if key in own},
                "params": [number[id(p)] for p in own["params"]],
            }
            for group, own in zip(mine, single.param_groups, strict=True)
        ]
        single.load_state_dict({"state": state, "param_groups": groups})


def by_name(numbered: Mapping[str, Any], optimizer: Any, names: Names) -> dict[str, Any]:
    """Names the parameters of a state that numbers them, as earlier versions wrote it."""
    name_of = {id(parameter): name for name, parameter in names.items()}
    state, groups = {}, []
    for single, saved in zip(
        optimizers_in(optimizer), numbered.get("optimizers", [numbered]), strict=True
    ):
        own = [name_of[id(p)] for group in single.param_groups for p in group["params"]]
        state |= {own[number]: values for number, values in saved["state"].items()}
        groups += [
            {**group, "params": [own[number] for number in group["params"]]}
            for group in saved["param_groups"]
        ]
    return {"state": state, "groups": groups}


def optimizers_in(optimizer: Any) -> list[torch.optim.Optimizer]:
    """The parts of `Together`, or the optimizer itself."""
    return list(getattr(optimizer, "optimizers", [optimizer]))


def learning_rate(training: TrainingSection, share: float, total_steps: int | None) -> float:
    """Linear warm-up over `warmup_ratio`, then cosine to zero or constant. `share`: 0 to 1, of the
    budget before this step; `total_steps`: None for a budget of time, whose first step has a
    hundredth of the peak."""
    peak, warm_up = training.learning_rate, training.warmup_ratio
    if share < warm_up:
        following = share + 1 / total_steps if total_steps else max(share, 0.01 * warm_up)
        return peak * min(1.0, following / warm_up)
    if training.lr_schedule == "constant":
        return peak
    after = (share - warm_up) / max(1 - warm_up, 1e-9)
    return peak * 0.5 * (1 + math.cos(math.pi * min(after, 1.0)))
