"""Sharding of a frozen target's layers over processes (FSDP2).

Embedding, final norm and output head stay whole on every process: drafters share them, and the loss
reads the head in many small pieces. After sharding all processes must run the target together, the
same number of times."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel
from transformers.utils import logging

from draftsmith.speculators.target import probe
from draftsmith.speculators.target.frozen_target import FrozenTarget
from draftsmith.speculators.target.target_head import ModelReader


def read_sharded(
    path_or_id: str,
    mesh: DeviceMesh,
    *,
    dtype: torch.dtype | str = "auto",
    device: torch.device | str = "cpu",
    trust_remote_code: bool = False,
    revision: str | None = None,
) -> PreTrainedModel:
    """A model of a checkpoint, sharded as by `shard_target`. It is read layer by layer: one layer
    is whole at a time, until its shard is cut. Modules beside the language model, such as a vision
    tower, are left out.

    Nothing is sent between processes, so that one may fail alone. Arguments as of
    `FrozenTarget.from_pretrained`. Errors: CheckpointError, UnsupportedTarget, also for a
    checkpoint that is quantised, or whose layers share tensors."""
    reader = ModelReader(
        path_or_id,
        dtype=dtype,
        device=device,
        trust_remote_code=trust_remote_code,
        revision=revision,
    )
    model = reader.without_layers()
    parts = probe.find_parts(model)
    layers: Any = model.get_submodule(reader.layers_name)
    with _no_progress_bars():
        for number in range(reader.num_layers):
            layer = reader.layer(number, model).requires_grad_(False)
            _shard_layer(layer, mesh, parts.stateful)
            layers[number] = layer
    _shard_rest(parts.decoder, layers, mesh)
    return model.to(device)  # type: ignore[arg-type]


def shard_target(target: FrozenTarget, mesh: DeviceMesh) -> FrozenTarget:
    """Shards the layers in place, on the mesh's devices; the caller moves the rest. A mesh of two
    dimensions has replicas along the first, and shards along the second."""
    for layer in target.layers:
        _shard_layer(layer, mesh, target.recurrent is not None)
    _shard_rest(target.decoder, target.layers, mesh)
    return target


def is_sharded(target: FrozenTarget) -> bool:
    """True once `shard_target` has cut it, or it was read in shards."""
    from torch.distributed.fsdp import FSDPModule

    return isinstance(target.decoder, FSDPModule)


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """transformers shows one for every model that it loads, here for every layer."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _shard_layer(layer: nn.Module, mesh: DeviceMesh, stateful: bool) -> None:
    """`stateful`: a module of it that keeps states runs alone too, when these are rolled back."""
    from torch.distributed.fsdp import fully_shard

    children = [child for child in layer.children() if not isinstance(child, nn.ModuleList)]
    for child in children if stateful else ():
        fully_shard(child, mesh=mesh, reshard_after_forward=True)
    fully_shard(layer, mesh=mesh, reshard_after_forward=True)


def _shard_rest(decoder: nn.Module, layers: nn.Module, mesh: DeviceMesh) -> None:
    """Makes the decoder the root, by which a layer is gathered ahead of its turn."""
    from torch.distributed.fsdp import fully_shard

    of_layers = {id(parameter) for parameter in layers.parameters()}
    others = {parameter for parameter in decoder.parameters() if id(parameter) not in of_layers}
    fully_shard(decoder, mesh=mesh, ignored_params=others)
