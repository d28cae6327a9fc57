"""Matrix products in float32, where all weights are in half precision: one of them was copied."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode

ATEN = torch.ops.aten
FACTORS = {  # product -> place of its first factor among the arguments
    ATEN.mm: 0,
    ATEN.bmm: 0,
    ATEN.matmul: 0,
    ATEN.linear: 0,
    ATEN.addmm: 1,
    ATEN.baddbmm: 1,
}


class WideProducts(TorchDispatchMode):
    """While it is entered, `shapes` of the first factors of products in float32. Products with
    vectors are none: angles of rotary positions, and a single score or confidence per row."""

    def __init__(self) -> None:
        super().__init__()
        self.products = 0  # in any precision
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        place = FACTORS.get(func.overloadpacket)
        if place is not None:
            factor = args[place]
            self.products += 1
            if out.dtype == torch.float32 and factor.shape[-1] > 1 and out.shape[-1] > 1:
                self.shapes.append(tuple(factor.shape))
        return out
