"""A frozen target whose layers are shared out over processes (FSDP2): each holds a part, gathered while it computes.

Embedding, final norm and output head stay whole on every process: drafters share them, and the loss reads the head in
many small pieces. From here on all processes run the target together, the same number of times. Knows no drafter.
"""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh

from speculators.target.frozen_target import FrozenTarget


def shard_target(target: FrozenTarget, mesh: DeviceMesh) -> FrozenTarget:
    """In place. Of one in the host's memory the layers move to the mesh's devices, each of them whole there only until
    it is parted; the rest is the caller's to move."""
    from torch.distributed.fsdp import fully_shard

    for layer in target.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    of_layers = {id(parameter) for parameter in target.layers.parameters()}
    others = {parameter for parameter in target.decoder.parameters() if id(parameter) not in of_layers}
    fully_shard(target.decoder, mesh=mesh, ignored_params=others)  # the root: a layer is gathered ahead of its turn
    return target
