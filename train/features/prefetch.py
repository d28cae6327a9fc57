"""The target's forward of the coming micro-step beside the drafter's work on this one, on a device that has streams.

A frozen target says the same whenever it is asked, so its forward need not wait for the optimizer: it is begun on a
stream of its own before the drafter's forward is, and taken where it would have been made. Costs the memory of one
more batch of features. Knows streams, and nothing of targets or drafters.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import fields

import torch
from torch import Tensor

from speculators.target.frozen_target import TargetFeatures
from train.recipe.recipe import Recipe

STREAMS = ("cuda", "xpu")  # devices whose work can be put in several queues


def looks_ahead(recipe: Recipe, device: str) -> bool:
    """Whether the target's forward can be begun early: it is frozen and whole, its texts are known, and the device (its
    kind, as torch calls it) does several things at once."""
    changes = recipe.joint is not None or recipe.on_policy is not None
    return recipe.features.overlap and recipe.target.sharding == "none" and not changes and device in STREAMS


class FeaturesAhead:
    """At most one batch of features that is under way, known by its `name`.

    The work is begun without waiting for what the device still has to do, so that it may read only what was there when
    this was made, and what it makes itself.
    """

    def __init__(self, device: torch.device) -> None:
        self._api = torch.get_device_module(device)
        self._stream = self._api.Stream()
        self._begun: tuple[Hashable, TargetFeatures] | None = None
        self._api.synchronize()

    def begin(self, name: Hashable, make: Callable[[], TargetFeatures]) -> None:
        """Begins it; what was begun before and not taken is dropped."""
        with self._api.stream(self._stream):
            self._begun = name, make()

    def take(self, name: Hashable) -> TargetFeatures | None:
        """What was begun under this name, for use on the current stream from here on; None if it is not that."""
        begun, self._begun = self._begun, None
        current = self._api.current_stream()
        current.wait_stream(self._stream)  # also for features of rows that are kept
        if begun is None or begun[0] != name:
            return None
        for field in fields(begun[1]):
            value = getattr(begun[1], field.name)
            if isinstance(value, Tensor) and value.device.type != "cpu":
                value.record_stream(current)  # its memory is not given to the other stream while this one reads it
        return begun[1]
