"""The products of heads with their weights, for many chunks of rows in a row.

A head is any function; its linear layers are recognised as it calls them. Under autocast a weight
is cast once for all chunks, and the gradient of a trained weight is added up in float32 in place,
outside of autograd, which would make one of the weight's size per chunk. Divergences and the choice
of chunks do not belong here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

# Bytes of a weight's float32 gradient that are added at once: on a CPU they stay in its cache.
SLAB_BYTES = {"cpu": 4 << 20, "cuda": 128 << 20}


class Products(TorchFunctionMode):
    """`linear` of matrices, inside of a `with`. It holds the cast weights and `gradients` for as
    long as it lives.

    gradients   {id of a trained weight: the sum of what came back to it [out, in], float32 (float64
                stays)}; autograd gives no gradient for these uses of it
    """

    def __init__(self) -> None:
        super().__init__()
        self.gradients: dict[int, Tensor] = {}
        # By the weight's id, which it keeps while it is held here.
        self._cast: dict[tuple[int, torch.dtype], tuple[Tensor, Tensor]] = {}
        self._made: Tensor | None = None

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        return (self._linear if func is linear else func)(*args, **(kwargs or {}))

    def made(self, logits: Tensor) -> bool:
        """True if these logits are what the last product returned: backward does not read them, and
        their memory can be written. Asked once, as the product is then no longer held."""
        last, self._made = self._made, None
        return logits is last and logits._base is None

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        plain = isinstance(weight, nn.Parameter) and weight.ndim == 2
        if not plain or hasattr(weight, "__tensor_flatten__"):
            # computed anew for every chunk, or in a layout of its own
            return linear(input, weight, bias)
        kind, low = input.device.type, weight
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            input, low = _cast(input, dtype), self._cast_once(weight, dtype)
            bias = None if bias is None else _cast(bias, dtype)
        if not torch.is_grad_enabled() or not (input.requires_grad or weight.requires_grad):
            return linear(input, low, bias)
        self._made = _Linear.apply(input, weight, bias, low.detach(), self)
        return self._made

    def _cast_once(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        if weight.dtype == dtype or weight.dtype == torch.float64:
            return weight
        if (id(weight), dtype) not in self._cast:
            self._cast[id(weight), dtype] = weight, weight.detach().to(dtype)
        return self._cast[id(weight), dtype][1]

    def add(self, weight: Tensor, grad: Tensor, input: Tensor) -> None:
        """Adds grad [n, out]^T @ input [n, in] to the gradient of a weight [out, in]."""
        exact = precise(weight.dtype)
        if id(weight) not in self.gradients:
            self.gradients[id(weight)] = torch.zeros_like(weight, dtype=exact)
        total = self.gradients[id(weight)]
        if grad.dtype == exact:
            total.addmm_(grad.t(), input)
            return
        slab = max(
            1, SLAB_BYTES.get(weight.device.type, SLAB_BYTES["cuda"]) // (4 * weight.shape[1])
        )
        for part, columns in zip(total.split(slab), grad.split(slab, dim=1), strict=True):
            part.add_(columns.t() @ input)


class _Linear(torch.autograd.Function):
    """`linear` with `low`, the weight in the dtype of the product; the weight's own gradient goes
    to `products`."""

    @staticmethod
    def forward(
        ctx, input: Tensor, weight: Tensor, bias: Tensor | None, low: Tensor, products: Products
    ) -> Tensor:
        ctx.products, ctx.weight = products, weight
        ctx.save_for_backward(input if weight.requires_grad else None, low)
        return linear(input, low, bias)

    @staticmethod
    def backward(ctx, grad: Tensor):
        input, low = ctx.saved_tensors
        for_input, for_weight, for_bias, *_ = ctx.needs_input_grad
        rows = grad.flatten(0, -2)  # [n, out]
        if for_weight:
            ctx.products.add(ctx.weight, rows, input.flatten(0, -2))
        grad_bias = rows.sum(0) if for_bias else None
        return grad @ low if for_input else None, None, grad_bias, None, None


def precise(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums are kept in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """As autocast does: float64 stays."""
    return x if x.dtype == torch.float64 else x.to(dtype)
