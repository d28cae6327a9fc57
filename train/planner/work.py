"""What the phases of a run have to do, in products, bytes and calls, and how long a device takes for it.

A product takes what its arithmetic or the reading of its weights takes, whichever is longer (a roofline); all else
takes the time to pass through memory, and every operation its start. Counts follow from sizes alone; nothing is run.
Knows no device by name and no file.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from speculators.sizes import NO_ATTENTION, AttentionSizes, Products
from train.planner.devices import Device, Range

CALLS_PER_MATRIX = 4  # operations around one product of a layer: norms, rotations, reshapes
HEAD_CALLS = 40  # operations of one chunk of the objective, or of one sampling step
TARGET_PASSES, DRAFT_PASSES = 12, 14  # over float32 logits of the target, and of the draft, in the objective
SAMPLING_PASSES = 8  # over float32 logits, for one token


@dataclass(frozen=True)
class Product:
    """Matrix products in one dtype: operations, and bytes of weights they read."""

    flops: float
    read: float
    dtype: torch.dtype


@dataclass(frozen=True)
class Work:
    """Adds up and scales. `traffic`: bytes read and written by all that is no product; `calls`: operations started."""

    products: tuple[Product, ...] = ()
    traffic: float = 0.0
    calls: float = 0.0
    sent: float = 0.0  # bytes to other devices

    def __add__(self, other: Work) -> Work:
        return Work(
            self.products + other.products,
            self.traffic + other.traffic,
            self.calls + other.calls,
            self.sent + other.sent,
        )

    def __mul__(self, times: float) -> Work:
        return Work(
            tuple(Product(times * p.flops, times * p.read, p.dtype) for p in self.products),
            times * self.traffic,
            times * self.calls,
            times * self.sent,
        )

    @property
    def flops(self) -> float:
        return sum(p.flops for p in self.products)

    def seconds(self, device: Device) -> Range:
        """On one device, at the shares of its peaks that may be reached."""
        return Range(*(self._at(device, i) for i in (2, 1, 0)))

    def _at(self, device: Device, which: int) -> float:
        reached, moved = device.products[which], device.transfers[which] * device.bandwidth
        products = sum(max(p.flops / (reached * device.peak(p.dtype)), p.read / moved) for p in self.products)
        return products + self.traffic / moved + self.calls * device.call_seconds + self.sent / device.link


def total(works: Iterable[Work]) -> Work:
    return sum(works, Work())


def forward(
    sizes: Products,
    tokens: float,
    dtype: torch.dtype,
    *,
    attention: AttentionSizes = NO_ATTENTION,
    keys: float = 0.0,
    passes: float = 1.0,
    products: float = 1.0,
) -> Work:
    """`tokens` tokens at once through layers of `sizes`, each asking `keys` keys. With a backward pass there are more
    `products` (3: of the inputs' and the weights' gradients) and more `passes` over what is around them."""
    read = sizes.touched(tokens) * dtype.itemsize
    scores = 2 * tokens * keys * attention.width
    return Work(
        (
            Product(products * 2 * tokens * sizes.weights, products * read, dtype),
            Product(products * scores, 0.0, dtype),
        ),
        traffic=passes * (2 * tokens * sizes.values + 2 * tokens * keys * attention.heads) * dtype.itemsize,
        calls=passes * CALLS_PER_MATRIX * sizes.count,
    )


def head(rows: float, width: int, vocabulary: int, dtype: torch.dtype, *, calls: float = 1.0, products: float = 1.0):
    """Logits of `rows` states, in `calls` portions; each reads the weights again."""
    weights = width * vocabulary
    return Work(
        (Product(products * 2 * rows * weights, products * calls * weights * dtype.itemsize, dtype),), calls=calls
    )


def over_logits(rows: float, vocabulary: int, passes: float) -> Work:
    """Elementwise work on float32 logits."""
    return Work(traffic=4 * rows * vocabulary * passes)


def decode(
    sizes: Products,
    attention: AttentionSizes,
    width: int,
    vocabulary: int,
    dtype: torch.dtype,
    *,
    rows: float,
    context: float,
    each: float = 1.0,
) -> Work:
    """One round: `each` new tokens for each of `rows` texts of `context` tokens, their logits and the sampling."""
    tokens = rows * each
    cache = Work(traffic=rows * context * attention.kv_values * dtype.itemsize)
    body = forward(sizes, tokens, dtype, attention=attention, keys=context)
    sampled = over_logits(tokens, vocabulary, SAMPLING_PASSES) + Work(calls=HEAD_CALLS + 2 * rows)
    return body + cache + head(tokens, width, vocabulary, dtype) + sampled


def muon(matrices: Iterable[tuple[int, int]], iterations: int = 5) -> Work:
    """Newton-Schulz on matrices of these shapes, in bfloat16 as torch.optim.Muon does it."""
    flops = traffic = calls = 0.0
    for a, b in matrices:
        m, n = min(a, b), max(a, b)
        flops += iterations * (4.0 * m * m * n + 2.0 * m**3)
        traffic += iterations * (6 * m * n + 6 * m * m) * 2 + 24.0 * m * n
        calls += iterations * 6 + 10
    return Work((Product(flops, 0.0, torch.bfloat16),), traffic=traffic, calls=calls)


def adamw(parameters: float, tensors: int) -> Work:
    """Weight, gradient and two moments read, three of them written, with temporaries in between."""
    return Work(traffic=4 * parameters * 12, calls=12 * tensors)
