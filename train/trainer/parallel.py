"""The drafter on several processes: whole on each of them, or sharded, parameters, gradients and
optimizer state.

The loss of a step is divided by counts over all processes, so that gradients are *summed*: what one
process would have computed. They are summed in buckets while the backward pass goes on, by torch's
DistributedDataParallel or FSDP2. The configuration of `accelerate launch` says whether the drafter
is sharded (`fsdp_version: 2`). The whole drafter is evaluated and saved."""

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
from typing_extensions import override

from draftsmith.speculators.drafter import Drafter
from draftsmith.speculators.errors import ConfigError
from draftsmith.speculators.target.frozen_target import FrozenTarget
from draftsmith.speculators.target.sharding import is_sharded, shard_target

Result = TypeVar("Result")


def whole(tensor: Tensor) -> Tensor:
    """Gathers a sharded tensor on every process, which all must call; others stay as they are."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class Replica:
    """What one process holds of the drafter: all of it, without others. `module` is what trains,
    `drafter` the same, whole."""

    def __init__(self, accelerator: Accelerator, drafter: Drafter) -> None:
        self.accelerator = accelerator
        self.drafter = drafter
        self.module = drafter

    def run(self, work: Callable[[], Result], last: bool) -> Result:
        """`work()`, a forward of one micro-step. In the backward pass of the step's `last`,
        gradients are summed over processes."""
        return work()

    def fill_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Zeros where a parameter has no gradient in any process, after the last backward pass."""
        for p in parameters:
            if p.grad is None:
                p.grad = torch.zeros_like(p)

    @contextmanager
    def whole(self) -> Iterator[Drafter]:
        """The drafter with its current weights. All processes enter together."""
        yield self.drafter

    def load(self, state: dict[str, Tensor]) -> None:
        """Loads the weights of a whole drafter."""
        self.drafter.load_state_dict(state, strict=True)


class _Work(nn.Module):
    """A forward that is passed in, with the parameters that it trains: what DDP wraps."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self.trained = nn.ParameterList(parameters)

    @override
    def forward(self, work: Callable[[], Result]) -> Result:
        return work()


class Replicated(Replica):
    """Every process holds the whole drafter, and `others`: parameters that train beside it."""

    def __init__(
        self, accelerator: Accelerator, drafter: Drafter, others: Sequence[nn.Parameter]
    ) -> None:
        super().__init__(accelerator, drafter)
        self.reduced = nn.parallel.DistributedDataParallel(
            _Work([*drafter.trainable_parameters(), *others]),
            init_sync=False,  # `make_replica` did it
            # a batch may have no term of a depth, and not every loss reads every parameter
            find_unused_parameters=True,
            gradient_as_bucket_view=True,
        )
        self.reduced.register_comm_hook(None, _sum_bucket)

    @override
    def run(self, work: Callable[[], Result], last: bool) -> Result:
        """What `work` returns."""
        self.reduced.require_backward_grad_sync = last
        return self.reduced(work)


def _sum_bucket(state, bucket):  # DDP refuses annotations that are text, as they are here
    """A future of the sum over processes of `bucket` (torch.distributed.GradBucket), where DDP's
    own reduction is a mean."""
    work = torch.distributed.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


class Sharded(Replica):
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


def make_replica(
    accelerator: Accelerator, drafter: Drafter, others: Sequence[nn.Parameter] = ()
) -> Replica:
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
    if sharded:
        return Sharded(accelerator, drafter)
    if accelerator.num_processes > 1:
        return Replicated(accelerator, drafter, others)
    return Replica(accelerator, drafter)


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


def check_launch() -> None:
    """ConfigError for a way of sharding that is not supported, by what `accelerate launch` leaves
    in the environment: before accelerate asks for a package of it, and before responses are
    written."""
    for kind in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
        if _launched_with(kind.value):
            raise ConfigError(
                f"{kind.value} is not supported; use MULTI_GPU, or FSDP version 2",
                where="accelerate",
            )
    version = os.environ.get("FSDP_VERSION", "1")
    if _launched_with("FSDP") and version != "2":
        raise ConfigError(
            f"FSDP version {version} is not supported; set fsdp_version: 2 in the configuration, or"
            " use MULTI_GPU",
            where="accelerate",
        )


def wants_shards(accelerator: Accelerator) -> bool:
    """True if the launch configuration asks for FSDP2."""
    return _launched_with("FSDP") and accelerator.num_processes > 1


def _launched_with(kind: str) -> bool:
    return os.environ.get(f"ACCELERATE_USE_{kind}", "false").lower() == "true"


def _plugin(accelerator: Accelerator) -> FullyShardedDataParallelPlugin:
    """The FSDP configuration; on CPUs accelerate leaves it in the environment."""
    return getattr(accelerator.state, "fsdp_plugin", None) or FullyShardedDataParallelPlugin()
