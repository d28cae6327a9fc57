"""Linear layers with constant weights, optimized for a few rows at a time.

Layers with the same input become one product. On a CPU a bfloat16 weight has a second copy, packed
for oneDNN's kernels, which takes a quarter to a third off the time of decoding. The copy suits
models that are small beside the memory: drafters, and targets up to `MOST_PACKED`. In float32 a few
rows on a CPU with AVX2 are multiplied from the weight's side (`can_turn`), which needs no copy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

MOST_PACKED = 2 << 30  # bytes of a target's weights that are packed, which holds them twice
_OPS = torch.ops.mkldnn
_WANTED = ("_reorder_linear_weight", "_linear_pointwise", "_is_mkldnn_bf16_supported")
HAS_PACKED = torch.backends.mkldnn.is_available() and all(hasattr(_OPS, name) for name in _WANTED)
PACKED_PRODUCT = _OPS._linear_pointwise.default if HAS_PACKED else None
MOST_TURNED = 8  # rows that are multiplied from the weight's side; more are slower so


class FrozenLinear:
    """[..., in] -> [..., concatenated outputs of all `linears`]; either all of them have a bias, or
    none has.

    `shared`: the product has the weights of `linears`, which are moved to lie together, and no copy
    but a packed one if `packs`, which does not follow what is written to them."""

    def __init__(self, *linears: nn.Linear, shared: bool = False, packs: bool = False) -> None:
        join = moved_together if shared else _joined
        self.weight = join([linear.weight for linear in linears])
        self.bias = None if linears[0].bias is None else join([linear.bias for linear in linears])
        self.packed: Tensor | None = None
        if (packs or not shared) and can_pack(self.weight):
            self.packed = _packed(self.weight, linears)
        self.turns = can_turn(self.weight)

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out of all linears], in their order."""
        if (
            self.packed is not None
            and x.dtype == torch.bfloat16
            and x.numel()
            and not torch.is_grad_enabled()
            and not torch.compiler.is_compiling()  # which takes no packed weight
        ):
            return PACKED_PRODUCT(x, self.packed, self.bias, "none", [], "")
        # Made 2-d, since a strided batch of one would use bmm, which takes four times as long.
        shape = x.shape
        rows = x if len(shape) == 2 else x.reshape(-1, shape[-1])
        if self.turns and 1 < len(rows) <= MOST_TURNED and not torch.compiler.is_compiling():
            out = turned_linear(rows, self.weight, self.bias)
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
    kept = [tensor.detach() for tensor in tensors]
    return torch.cat(kept) if len(kept) > 1 else kept[0]


def moved_together(tensors: list[Tensor]) -> Tensor:
    """All of them as one, of which they become views: what is written to either is in both."""
    first = tensors[0]
    end = tensors[0].storage_offset()
    memory = first.untyped_storage().data_ptr()
    sizes = [tensor.shape[0] for tensor in tensors]
    for tensor in tensors:
        lies = tensor.storage_offset() == end and tensor.untyped_storage().data_ptr() == memory
        if not (lies and tensor.is_contiguous()):
            break
        end += tensor.numel()
    else:
        return first.detach().as_strided((sum(sizes), *first.shape[1:]), first.stride())
    with torch.inference_mode(False), torch.no_grad():
        whole = torch.cat([tensor.detach() for tensor in tensors])
        for tensor, part in zip(tensors, whole.split(sizes), strict=True):
            tensor.data = part
    return whole


# Packed copies that are in use, by what they are of: engines over one target share them.
_PACKED: WeakValueDictionary[tuple, Tensor] = WeakValueDictionary()


def _packed(weight: Tensor, linears: Sequence[nn.Linear]) -> Tensor:
    """A copy of `weight`, which has the weights of `linears`, packed for oneDNN; the same as
    before while somebody has it and no weight was written to."""
    key: tuple | None = None
    # tensors made in inference_mode do not count what is written to them
    if not any(linear.weight.is_inference() for linear in linears):
        versions = [linear.weight._version for linear in linears]
        key = (weight.data_ptr(), *weight.shape, *versions)
    packed = None if key is None else _PACKED.get(key)
    if packed is None:
        with torch.inference_mode(False), torch.no_grad():
            packed = _OPS._reorder_linear_weight(weight.contiguous(), 1)
        if key is not None:
            _PACKED[key] = packed
    return packed


def turned_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """linear(x, weight, bias) of x [M, in], as the product weight · xᵀ [out, M] turned back."""
    if bias is None:
        product = torch.mm(weight, x.t())
    else:
        product = torch.addmm(bias[:, None], weight, x.t())
    return product.t().contiguous()


def can_turn(weight: Tensor) -> bool:
    """True if `turned_linear` is the faster form for 2 to MOST_TURNED rows: float32 on a CPU whose
    best instructions are AVX2, where MKL takes more than twice the time of one row for them.

    SmolLM2-135M's products on one thread of an EPYC take 1.8 times as long as turned at 4 rows, 1.2
    to 1.4 at 5; Qwen3-0.6B's 2.0 at 5. Other CPUs were not measured."""
    float32 = weight.device.type == "cpu" and weight.dtype == torch.float32
    return float32 and torch.backends.cpu.get_cpu_capability() == "AVX2"


def can_pack(weight: Tensor) -> bool:
    """True if oneDNN has kernels for a packed copy: bfloat16 on a CPU that computes in it."""
    bfloat16 = weight.device.type == "cpu" and weight.dtype == torch.bfloat16
    return bfloat16 and HAS_PACKED and _OPS._is_mkldnn_bf16_supported()
