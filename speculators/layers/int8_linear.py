"""Linear layers whose weights are int8 numbers, in memory as on disk: half the bytes of bfloat16 to
read for a draft, a quarter of float32's.

A row of the weight has one scale, and so has a row of the input when it comes: the largest
magnitude of the row over 127. What is multiplied is int8, and sums are exact in int32, so that a
row's output depends on no other row. vLLM computes the same from compressed-tensors' format
`int-quantized` (W8A8: a static scale per channel, a dynamic one per token). For inference only."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from typing_extensions import override

from draftsmith.speculators.layers.frozen_linear import moved_together

LARGEST = 127
TINY = 1e-12  # a row of zeros has this scale
CUDA_ROWS = 17  # fewer rows than that have no int8 product there
CUDA_MULTIPLE = 8  # of both sizes of its weights


class Int8Linear(nn.Module):
    """In the place of an nn.Linear: `weight` int8 [out, in] and `weight_scale` float32 [out, 1], of
    which `weight * weight_scale` is the weight; `bias` as there."""

    weight: Tensor
    weight_scale: Tensor

    def __init__(self, in_features: int, out_features: int, bias: bool) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None
        # the dtype that a cast of the module gives its inputs and outputs
        self.register_buffer("like", torch.empty(0), persistent=False)
        self.register_buffer("weight", torch.empty(out_features, in_features, dtype=torch.int8))
        self.register_buffer("weight_scale", torch.empty(out_features, 1, dtype=torch.float32))

    @classmethod
    @torch.no_grad()
    def of(cls, linear: nn.Linear) -> Int8Linear:
        """The nearest int8 numbers to the weight of `linear`."""
        quantised = cls(linear.in_features, linear.out_features, linear.bias is not None)
        quantised = quantised.to(linear.weight.device, linear.weight.dtype)
        quantised.weight, quantised.weight_scale = rows_to_int8(linear.weight)
        if linear.bias is not None:
            quantised.bias = linear.bias
        return quantised

    def rows(self, ids: Tensor) -> Int8Linear:
        """A copy of the rows `ids` [n]: a layer with n outputs."""
        ids = ids.to(self.weight.device)
        kept = Int8Linear(self.in_features, len(ids), self.bias is not None)
        kept = kept.to(self.weight.device, self.like.dtype)
        kept.weight = self.weight.index_select(0, ids)
        kept.weight_scale = self.weight_scale.index_select(0, ids)
        if self.bias is not None:
            kept.bias = nn.Parameter(self.bias.detach().index_select(0, ids), requires_grad=False)
        return kept

    @override
    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features], in the precision of x."""
        return int8_product(x, self.weight, self.weight_scale, self.bias)

    def _apply(self, fn: Callable, *args, **kwargs) -> nn.Module:
        """A cast leaves the scales in float32."""
        scale = self.weight_scale
        super()._apply(fn, *args, **kwargs)
        self.weight_scale = scale.to(self.weight.device)
        return self


class FrozenInt8Linear:
    """[..., in] -> [..., concatenated outputs of all `linears`], which either all have a bias or
    none. Their weights are moved to lie together; nothing is held twice."""

    def __init__(self, *linears: Int8Linear) -> None:
        self.weight = moved_together([linear.weight for linear in linears])
        self.weight_scale = torch.cat([linear.weight_scale for linear in linears])
        biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
        self.bias = torch.cat(biases) if biases else None

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out of all linears], in their order."""
        return int8_product(x, self.weight, self.weight_scale, self.bias)


def rows_to_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [N, in] -> int8 [N, in] and float32 scales [N, 1], each row's largest magnitude / 127."""
    wide = x.float()
    scale = wide.abs().amax(-1, keepdim=True).clamp_min_(TINY).div_(LARGEST)
    return (wide / scale).round_().to(torch.int8), scale


def int8_product(x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., in], weight int8 [out, in] with weight_scale [out, 1], bias [out] -> [..., out] in
    the dtype of x."""
    rows = x.reshape(-1, x.shape[-1])
    if not len(rows):
        return x.new_zeros(*x.shape[:-1], len(weight))
    ints, scale = rows_to_int8(rows)
    out = _sums(ints, weight) * scale * weight_scale.t()  # float32 [N, out]
    if bias is not None:
        out = out + bias
    return out.to(x.dtype).view(*x.shape[:-1], len(weight))


def _sums(ints: Tensor, weight: Tensor) -> Tensor:
    """int8 [N, in] and [out, in] -> [N, out], exact."""
    if ints.device.type == "cpu":
        return torch._int_mm(ints, weight.t())
    if any(size % CUDA_MULTIPLE for size in weight.shape):
        return (ints.double() @ weight.double().t()).float()
    padding = max(CUDA_ROWS - len(ints), 0)
    return torch._int_mm(nn.functional.pad(ints, (0, 0, 0, padding)), weight.t())[: len(ints)]


def quantise_linears(module: nn.Module) -> None:
    """Puts an Int8Linear in the place of every nn.Linear below `module` that has several outputs:
    a projection onto one number reads too little to be worth its rounding. Modules that are the
    same stay so."""
    replaced: dict[nn.Module, Int8Linear] = {}
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and child.out_features > 1:
                if child not in replaced:
                    replaced[child] = Int8Linear.of(child)
                setattr(parent, name, replaced[child])


def dtype_of(module: nn.Module) -> torch.dtype:
    """The floating-point dtype that `module` computes in: of its first parameter, or where all its
    weights are int8, of their inputs."""
    for parameter in module.parameters():
        if parameter.is_floating_point():
            return parameter.dtype
    return next(buffer.dtype for buffer in module.buffers() if buffer.is_floating_point())
