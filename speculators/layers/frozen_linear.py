"""Linear layers with constant weights, optimized for one row at a time.

Layers with the same input become one product. On a CPU the weight has a second copy: in bfloat16 packed for oneDNN's
kernels, which halves the time of a few rows if the weight is not in the cache; in float32 transposed, which makes one
row up to a quarter faster. The copy suits a drafter, which is small, and not a target, whose weights are shared.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

MOST_JOINED = 64 << 20  # bytes of weights; reading more takes so long that the calls saved are nothing


class FrozenLinear:
    """[..., in] -> [..., concatenated outputs of all `linears`]; either all of them have a bias, or none has.

    `shared`: the product has the weights of `linears`, which are moved to lie together, and no copy.
    """

    def __init__(self, *linears: nn.Linear, shared: bool = False) -> None:
        join = _moved_together if shared else _joined
        self.weight = join([linear.weight for linear in linears])
        self.bias = None if linears[0].bias is None else join([linear.bias for linear in linears])
        self.packed = _pack(self.weight) if not shared and _packs(self.weight) else None
        self.across = self.weight.t().contiguous() if not shared and _turns(self.weight) else None  # [in, out]

    @staticmethod
    def worth_joining(*linears: nn.Linear) -> bool:
        """True if the weights of `linears` are small enough for their number to matter."""
        return sum(linear.weight.nbytes for linear in linears) <= MOST_JOINED

    def __call__(self, x: Tensor) -> Tensor:
        shape = x.shape  # made 2-d, since a strided batch of one would use bmm, which takes four times as long
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
    """Makes every nn.Linear of `module` compute as a FrozenLinear, until `thaw_linears`."""
    for linear in _linears(module):
        linear.forward = FrozenLinear(linear)


def thaw_linears(module: nn.Module) -> None:
    """The inverse of `freeze_linears`; does nothing without it."""
    for linear in _linears(module):
        linear.__dict__.pop("forward", None)


def _linears(module: nn.Module) -> Iterator[nn.Linear]:
    return (child for child in module.modules() if type(child) is nn.Linear)


def _joined(tensors: list[Tensor]) -> Tensor:
    return torch.cat([each.detach() for each in tensors]) if len(tensors) > 1 else tensors[0].detach()


def _moved_together(tensors: list[Tensor]) -> Tensor:
    """All of them as one, of which they become views: what is written to either is in both."""
    first, end = tensors[0], tensors[0].storage_offset()
    together = True
    for each in tensors:
        at, storage = each.storage_offset(), each.untyped_storage().data_ptr()
        together &= each.is_contiguous() and at == end and storage == first.untyped_storage().data_ptr()
        end = at + each.numel()
    sizes = [each.shape[0] for each in tensors]
    if together:
        return first.detach().as_strided((sum(sizes), *first.shape[1:]), first.stride())
    with torch.inference_mode(False), torch.no_grad():
        whole = torch.cat([each.detach() for each in tensors])
        for each, part in zip(tensors, whole.split(sizes), strict=True):
            each.data = part
    return whole


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
