"""Numbers that the host knows, for a device, without waiting for it.

A copy from ordinary memory to a GPU makes the host wait until everything launched before it is done; between the steps
of a draft chain that would cost more than a step. A copy from pinned memory is launched like any other work.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def on_device(numbers: Sequence, device: torch.device, dtype: torch.dtype = torch.long) -> Tensor:
    """Numbers, or rows of them, as a tensor of `dtype` on `device`."""
    return torch.tensor(numbers, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on `device`."""
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)
