"""The state of an optimizer by the names of its parameters, whole: what a checkpoint holds.

How many processes there are, and whether they hold parameters whole or in shards, leaves no trace in it. Knows no
optimizer by name, no file and no loop.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from speculators.errors import CheckpointError
from train.trainer.parallel import like_shards, whole

Names = Mapping[str, nn.Parameter]  # of all trained parameters, "drafter.fc.weight" and the like


def optimizer_state(optimizer: Any, names: Names) -> dict[str, Any]:
    """{"state": {parameter: {key: tensor}}, "groups": [{"params": [parameter], option: value}]}, in the host's memory.

    All processes must ask at the same time.
    """
    name_of = {id(parameter): name for name, parameter in names.items()}
    state, groups = {}, []
    for each in optimizers_in(optimizer):
        for parameter, kept in each.state.items():
            state[name_of[id(parameter)]] = {
                key: whole(value).detach().cpu().clone() if isinstance(value, Tensor) else value
                for key, value in kept.items()
            }
        for group in each.param_groups:
            groups.append({**group, "params": [name_of[id(parameter)] for parameter in group["params"]]})
    return {"state": state, "groups": groups}


def load_optimizer_state(optimizer: Any, saved: Mapping[str, Any], names: Names) -> None:
    """What `optimizer_state` gave, into an optimizer of the same groups. CheckpointError if they are others."""
    name_of, first = {id(parameter): name for name, parameter in names.items()}, 0
    for each in optimizers_in(optimizer):
        mine = saved["groups"][first : first + len(each.param_groups)]
        first += len(each.param_groups)
        wanted = [[name_of[id(p)] for p in group["params"]] for group in each.param_groups]
        if wanted != [group["params"] for group in mine]:
            raise CheckpointError("the optimizer's parameters are not those of the checkpoint")
        parameters = [parameter for group in each.param_groups for parameter in group["params"]]
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
            {**group, "params": [number[id(p)] for p in own["params"]]}
            for group, own in zip(mine, each.param_groups, strict=True)
        ]
        each.load_state_dict({"state": state, "param_groups": groups})


def by_name(numbered: Mapping[str, Any], optimizer: Any, names: Names) -> dict[str, Any]:
    """A state that counts parameters instead of naming them, as checkpoints once held it."""
    name_of = {id(parameter): name for name, parameter in names.items()}
    state, groups = {}, []
    for each, saved in zip(optimizers_in(optimizer), numbered.get("optimizers", [numbered]), strict=True):
        own = [name_of[id(p)] for group in each.param_groups for p in group["params"]]
        state |= {own[number]: kept for number, kept in saved["state"].items()}
        groups += [{**group, "params": [own[number] for number in group["params"]]} for group in saved["param_groups"]]
    return {"state": state, "groups": groups}


def optimizers_in(optimizer: Any) -> list[torch.optim.Optimizer]:
    """Those that `train.trainer.optimizers.Together` is made of, or the one."""
    return list(getattr(optimizer, "optimizers", [optimizer]))
