"""Linear layers that will not change again, made quick for one row at a time.

Layers that read the same input become one product. On a CPU the weight is laid out a second time: in bfloat16 as
oneDNN's kernels want it, which halves a product of few rows with a weight that has left the cache; in float32 the other
way round, by which one row is up to a quarter faster. Costs a second copy of the weights: right for a drafter, which is
small, and not for a target.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn


class FrozenLinear:
    """[..., in] -> [..., the outputs of all `linears`, one behind the other]; all of them have a bias, or none has."""

    def __init__(self, *linears: nn.Linear) -> None:
        self.weight = _joined([linear.weight.detach() for linear in linears])
        self.bias = None if linears[0].bias is None else _joined([linear.bias.detach() for linear in linears])
        self.packed = _pack(self.weight) if _packs(self.weight) else None
        self.across = self.weight.t().contiguous() if _turns(self.weight) else None  # [in, out]

    def __call__(self, x: Tensor) -> Tensor:
        shape = x.shape  # two dimensions: a strided batch of one would go through bmm, at four times the price
        rows = x if len(shape) == 2 else x.reshape(-1, shape[-1])
        count, across = rows.shape[0], self.across
        packed = self.packed is not None and x.dtype == torch.bfloat16 and count > 0
        if torch.compiler.is_compiling() or torch.is_grad_enabled():  # a compiler chooses its own layout
            out = nn.functional.linear(rows, self.weight, self.bias)
        elif packed:
            out = torch.ops.mkldnn._linear_pointwise(rows, self.packed, self.bias, "none", [], "")
        elif across is not None and count == 1 and rows.dtype == across.dtype:
            out = rows.mm(across) if self.bias is None else torch.addmm(self.bias, rows, across)
        else:
            out = nn.functional.linear(rows, self.weight, self.bias)
        return out if len(shape) == 2 else out.view(*shape[:-1], self.weight.shape[0])


def freeze_linears(module: nn.Module) -> None:
    """Every nn.Linear of `module` answers as a FrozenLinear, until `thaw_linears`."""
    for linear in _linears(module):
        linear.forward = FrozenLinear(linear)


def thaw_linears(module: nn.Module) -> None:
    """Undoes `freeze_linears`; nothing where it was not called."""
    for linear in _linears(module):
        linear.__dict__.pop("forward", None)


def _linears(module: nn.Module) -> Iterator[nn.Linear]:
    return (each for each in module.modules() if type(each) is nn.Linear)


def _joined(tensors: list[Tensor]) -> Tensor:
    return torch.cat(tensors) if len(tensors) > 1 else tensors[0]


def _turns(weight: Tensor) -> bool:
    return weight.device.type == "cpu" and weight.dtype == torch.float32


def _packs(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16 or not torch.backends.mkldnn.is_available():
        return False
    ops = torch.ops.mkldnn
    wanted = ("_reorder_linear_weight", "_linear_pointwise", "_is_mkldnn_bf16_supported")
    return all(hasattr(ops, name) for name in wanted) and ops._is_mkldnn_bf16_supported()


def _pack(weight: Tensor) -> Tensor:
    with torch.inference_mode(False), torch.no_grad():
        return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 1)
