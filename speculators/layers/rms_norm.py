"""Root-mean-square norm, in few calls where it is mostly calls."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

# numbers on a CPU whose norm is mostly calls; of more, the mirrored copy costs what the calls saved
MOST_MIRRORED = 8192


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., n] ÷ sqrt(mean(x²) + eps) · weight, which is [n] or has more of the dimensions of x.

    torch computes this on a CPU in some eight calls, and a layer norm in one. (x, -x) has mean 0
    and the mean square of x as its variance, so that the first half of its layer norm is this
    norm. A step of decoding with a small model takes three norms per layer, of a few rows: a sixth
    of its time is in those calls. Gradients and compiled code take torch's own."""
    mirrored = (
        x.device.type == "cpu"
        and x.numel() <= MOST_MIRRORED
        and not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
    )
    if mirrored:
        n = x.shape[-1]
        both = torch.cat([x, -x], dim=-1)
        return torch.layer_norm(both, (2 * n,), None, None, eps).narrow(-1, 0, n) * weight
    if weight.dim() == 1:
        return functional.rms_norm(x, x.shape[-1:], weight, eps)
    return functional.rms_norm(x, x.shape[-1:], None, eps) * weight
