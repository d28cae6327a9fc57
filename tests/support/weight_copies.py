"""Copies of weights in another precision, which take a model's memory and its time again."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

CAST = torch.ops.aten._to_copy.default


class WeightCopies(TorchDispatchMode):
    """While it is entered: `shapes` of what is cast to `dtype` of the weight matrices of these
    modules. Vectors, such as norms and biases, may be."""

    def __init__(self, modules: Iterable[nn.Module], dtype: torch.dtype) -> None:
        super().__init__()
        weights = [p for module in modules for p in module.parameters() if p.ndim > 1]
        self._memory = {weight.untyped_storage().data_ptr() for weight in weights}
        self._dtype = dtype
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is CAST and out.dtype == self._dtype and args[0].ndim > 1:
            if args[0].untyped_storage().data_ptr() in self._memory:
                self.shapes.append(tuple(out.shape))
        return out
