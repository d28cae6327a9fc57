"""Sharding of a frozen target's layers over processes (FSDP2).

Embedding, final norm and output head stay whole on every process: drafters share them, and the loss
reads the head in many small pieces. After sharding all processes must run the target together, the
same number of times."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh

from draftsmith.speculators.target.frozen_target import FrozenTarget


def shard_target(target: FrozenTarget, mesh: DeviceMesh) -> FrozenTarget:
    """Shards the layers in place, on the mesh's devices; the caller moves the rest."""
    from torch.distributed.fsdp import fully_shard

    for layer in target.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    of_layers = {id(parameter) for parameter in target.layers.parameters()}
    others = {
        parameter for parameter in target.decoder.parameters() if id(parameter) not in of_layers
    }
    fully_shard(
        target.decoder, mesh=mesh, ignored_params=others
    )  # the root: a layer is gathered ahead of its turn
    return target
