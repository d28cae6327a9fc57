"""Work as matrix products, bytes through memory and operations, and the time that a device takes for it.

A product takes the time of its arithmetic or of its operands' way through memory, whichever is longer (a roofline).
Everything else takes the time of its bytes, and every operation a fixed start, which an accelerator does not wait for.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from train.planner.devices import CPU, Device, Range


class Product(NamedTuple):
    """A matrix product or an attention: operations, bytes read and written, and the dtype of its inputs."""

    flops: float
    moved: float
    dtype: torch.dtype


@dataclass
class Work:
    """A vector: works are added and scaled. `products`: how often each is made; `traffic`: bytes read and written by
    everything else; `calls`: operations started; `sent`: bytes to other devices."""

    products: dict[Product, float] = field(default_factory=dict)
    traffic: float = 0.0
    calls: float = 0.0
    sent: float = 0.0

    def __add__(self, other: Work) -> Work:
        products = dict(self.products)
        for product, times in other.products.items():
            products[product] = products.get(product, 0) + times
        return Work(products, self.traffic + other.traffic, self.calls + other.calls, self.sent + other.sent)

    def __mul__(self, times: float) -> Work:
        products = {product: times * n for product, n in self.products.items()}
        return Work(products, times * self.traffic, times * self.calls, times * self.sent)

    @property
    def flops(self) -> float:
        return sum(product.flops * times for product, times in self.products.items())

    def seconds(self, device: Device) -> Range:
        """The time on one device, from the best to the worst part of its peaks that may be reached."""
        return Range(*(self._seconds(device, i) for i in (2, 1, 0)))

    def _seconds(self, device: Device, which: int) -> float:
        reached, bandwidth = device.products[which], device.transfers[which] * device.bandwidth
        computed = self.traffic / bandwidth + sum(
            times * max(p.flops / (reached * device.peak(p.dtype)), p.moved / bandwidth)
            for p, times in self.products.items()
        )
        started = self.calls * device.call_seconds
        # an accelerator computes while the next operations are started
        return (computed + started if device.kind == CPU else max(computed, started)) + self.sent / device.link


def total(works: Iterable[Work]) -> Work:
    return sum(works, Work())
