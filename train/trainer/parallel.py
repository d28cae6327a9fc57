"""The drafter on several processes: whole on each of them, or sharded, parameters, gradients and
optimizer state.

The loss of a step is divided by counts over all processes, so that gradients are *summed*: what one
process would have computed. The configuration of `accelerate launch` says whether the drafter is
sharded (`fsdp_version: 2`). The whole drafter is evaluated and saved."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import (
    DistributedType,
    FullyShardedDataParallelPlugin,
    broadcast,
    gather_object,
)
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from draftsmith.speculators.drafter import Drafter
from draftsmith.speculators.errors import ConfigError
from draftsmith.speculators.target.frozen_target import FrozenTarget
from draftsmith.speculators.target.sharding import is_sharded, shard_target

Result = TypeVar("Result")


def whole(tensor: Tensor) -> Tensor:
    """Gathers a sharded tensor on every process, which all must call; others stay as they are."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class Replicated:
    """Every process holds the whole drafter. `module` is what trains, `drafter` the same, whole."""

    def __init__(self, accelerator: Accelerator, drafter: Drafter) -> None:
        self.accelerator = accelerator
        self.drafter = drafter
        self.module = drafter

    def run(self, work: Callable[[], Result], last: bool) -> Result:
        """`work()`, a forward of one micro-step; `last`: of the step."""
        return work()

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Sums gradients over processes. A head has gradients once per step, after its last
        micro-step, so that there is no computation to overlap it with."""
        fill_gradients(parameters)
        if self.accelerator.num_processes > 1:
            for p in parameters:
                p.grad = self.accelerator.reduce(p.grad, "sum")

    @contextmanager
    def whole(self) -> Iterator[Drafter]:
        """The drafter with its current weights. All processes enter together."""
        yield self.drafter

    def load(self, state: dict[str, Tensor]) -> None:
        """Loads the weights of a whole drafter."""
        self.drafter.load_state_dict(state, strict=True)


class Sharded(Replicated):
    """`module` is a copy of the drafter under FSDP2: between steps every process holds its part of
    every parameter.

    The drafter is one unit, and its `shard_units` units of their own: a unit is whole while it
    computes. A head runs its layers once per depth, so that a head of one unit is gathered once per
    step and not once per depth. While it trains, the whole drafter waits in the host's memory."""

    def __init__(self, accelerator: Accelerator, drafter: Drafter) -> None:
        from torch.distributed.fsdp import FSDPModule, fully_shard

        super().__init__(accelerator, drafter)
        self.module = drafter.deep_copy()
        mesh = mesh_of(accelerator)
        plugin = _plugin(accelerator)
        for unit in self.module.shard_units():
            fully_shard(unit, mesh=mesh, reshard_after_forward=bool(plugin.reshard_after_forward))
        fully_shard(self.module, mesh=mesh, reshard_after_forward=False)
        for unit in (m for m in self.module.modules() if isinstance(m, FSDPModule)):
            unit.set_gradient_divide_factor(1.0)  # a sum ...
            unit.set_force_sum_reduction_for_comms(True)  # ... which every backend has
        self.drafter.to("cpu")

    def run(self, work: Callable[[], Result], last: bool) -> Result:
        """What `work` returns. Gradients are summed over processes in the step's `last` batch."""
        root: Any = self.module
        root.set_requires_gradient_sync(last)
        root.set_is_last_backward(last)
        root.set_reshard_after_backward(last)
        return self.module(work)

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """FSDP has summed them in the last backward."""
        fill_gradients(parameters)

    @contextmanager
    def whole(self) -> Iterator[Drafter]:
        """The drafter with whole weights, which all processes gather together; on the device
        inside, in the host's memory afterwards."""
        weights = self.drafter.state_dict()
        with torch.no_grad():
            for name, tensor in self.module.state_dict().items():
                weights[name].copy_(whole(tensor))
        self.drafter.to(self.accelerator.device)
        try:
            yield self.drafter
        finally:
            self.drafter.to("cpu")

    def load(self, state: dict[str, Tensor]) -> None:
        """Puts whole weights into the drafter and, as shards, into what trains."""
        super().load(state)
        set_model_state_dict(self.module, state, options=StateDictOptions(full_state_dict=True))


def fill_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Zeros where a parameter has no gradient, so that all processes sum the same tensors."""
    for p in parameters:
        if p.grad is None:
            p.grad = torch.zeros_like(p)


def make_replica(
    accelerator: Accelerator, drafter: Drafter, others: Sequence[nn.Parameter] = ()
) -> Replicated:
    """The drafter, replicated or sharded as the launch configuration says, with the weights of the
    first process. `others`: parameters trained beside it (a target's adapter), likewise."""
    sharded = wants_shards(accelerator)
    if sharded and others:
        raise ConfigError(
            "a target that is trained jointly cannot be sharded; launch with a configuration"
            " without FSDP",
            where="joint",
        )
    if accelerator.num_processes > 1:
        with torch.no_grad():
            for tensor in (*drafter.state_dict().values(), *others):
                tensor.copy_(broadcast(tensor.detach().clone()))
    return Sharded(accelerator, drafter) if sharded else Replicated(accelerator, drafter)


def shard_over_processes(accelerator: Accelerator, target: FrozenTarget, sharding: str) -> None:
    """Shards the target in place as `target.sharding` says, unless it was read in shards; with one
    process it stays whole."""
    if sharding == "fsdp" and accelerator.num_processes > 1 and not is_sharded(target):
        shard_target(target, target_mesh(accelerator)).to(accelerator.device)


def mesh_of(accelerator: Accelerator) -> DeviceMesh:
    """All processes in a row."""
    return init_device_mesh(accelerator.device.type, (accelerator.num_processes,))


def target_mesh(accelerator: Accelerator) -> DeviceMesh:
    """Of a sharded target: [nodes, processes of a node], with replicas along the first dimension
    and shards along the second, so that no weights cross the network in a forward. All processes
    in a row where there is one node, or one process on a node, or nodes differ in size."""
    count = accelerator.num_processes
    sizes = set(gather_object([int(os.environ.get("LOCAL_WORLD_SIZE", count))]))
    local = min(sizes)
    if len(sizes) > 1 or not 1 < local < count or count % local:
        return mesh_of(accelerator)
    names = ("replicate", "shard")
    return init_device_mesh(accelerator.device.type, (count // local, local), mesh_dim_names=names)


def wants_shards(accelerator: Accelerator) -> bool:
    """True if the launch configuration asks for FSDP2. ConfigError for other ways of sharding."""
    kind = accelerator.distributed_type
    if kind in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
        raise ConfigError(
            f"{kind.value} is not supported; use MULTI_GPU, or FSDP version 2",
            where="accelerate",
        )
    sharded = os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
    if sharded and _plugin(accelerator).fsdp_version != 2:
        raise ConfigError("set fsdp_version: 2 in the configuration", where="accelerate")
    return sharded and accelerator.num_processes > 1


def _plugin(accelerator: Accelerator) -> FullyShardedDataParallelPlugin:
    """The FSDP configuration; on CPUs accelerate leaves it in the environment."""
    return getattr(accelerator.state, "fsdp_plugin", None) or FullyShardedDataParallelPlugin()
