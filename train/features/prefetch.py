"""The target's forward of the next micro-step runs beside the drafter's work on this one, on a
device with streams.

A frozen target computes the same features at any time, so its forward need not wait for the
optimizer: it begins on a stream of its own before the drafter's forward, and is taken where it
would have been computed. It costs the memory of one more batch of features."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import fields

import torch
from torch import Tensor

from draftsmith.speculators.target.frozen_target import TargetFeatures
from draftsmith.train.recipe.recipe import Recipe

STREAMS = ("cuda", "xpu")  # devices whose work can be put in several queues


def looks_ahead(recipe: Recipe, device: str) -> bool:
    """True if the target's forward can begin early: it is frozen and not sharded, its texts are
    known, and the device type has streams."""
    changes = recipe.joint is not None or recipe.on_policy is not None
    return recipe.target.sharding == "none" and not changes and device in STREAMS


class FeaturesAhead:
    """At most one batch of features in flight, known by its `name`.

    It does not wait for earlier work of the device, so that it may read only tensors that existed
    when this object was made, and its own."""

    def __init__(self, device: torch.device) -> None:
        self._api = torch.get_device_module(device)
        self._stream = self._api.Stream()
        self._begun: tuple[Hashable, TargetFeatures] | None = None
        self._api.synchronize()

    def begin(self, name: Hashable, make: Callable[[], TargetFeatures]) -> None:
        """Begins a batch; one that was begun before and not taken is dropped."""
        with self._api.stream(self._stream):
            self._begun = name, make()

    def take(self, name: Hashable) -> TargetFeatures | None:
        """The batch that was begun under this name, for use on the current stream from here on;
        else None."""
        begun, self._begun = self._begun, None
        current = self._api.current_stream()
        current.wait_stream(self._stream)  # also for features of rows that are kept
        if begun is None or begun[0] != name:
            return None
        for field in fields(begun[1]):
            value = getattr(begun[1], field.name)
            if isinstance(value, Tensor) and value.device.type != "cpu":
                value.record_stream(
                    current
                )  # its memory is not given to the other stream while this one reads it
        return begun[1]
