"""What `auto` means where a precision is asked for: the checkpoint's own, unless the device cannot multiply in it.

A CPU without instructions for bfloat16 converts every operand first. A product of a few rows, which is what verifying
a draft is, then takes several times as long as in float32 and grows with each row, so that drafting gains nothing;
float32 holds every bfloat16 number exactly. Only CPUs are told apart: accelerators run what the checkpoint names.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Mapping, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from speculators.errors import ConfigError

logger = logging.getLogger(__name__)

# As torch.cpu.get_capabilities calls them; of other architectures nothing is assumed.
BFLOAT16 = {
    "x86_64": ("avx512_bf16", "amx_bf16", "avx_ne_convert", "avx10_2"),
    "arm64": ("bf16", "sve_bf16"),
}


def own_device() -> torch.device:
    """This machine's accelerator if one is there, else its CPU. What torch was built for is not asked: a CUDA build
    runs on machines without a GPU too."""
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def free_memory() -> None:
    """Gives what nobody refers to any more back to the device, for another process or another allocation."""
    gc.collect()
    if (device := own_device()).type != "cpu":
        torch.get_device_module(device).empty_cache()


def multiplies_bfloat16(device: torch.device | str) -> bool:
    """Whether products in bfloat16 are at home on this device; for a CPU this machine's is asked."""
    if torch.device(device).type != "cpu":
        return True
    found = getattr(torch.cpu, "get_capabilities", dict)()
    names = BFLOAT16.get({"aarch64": "arm64", "amd64": "x86_64"}.get(a := found.get("architecture", ""), a))
    return names is None or any(found.get(name) for name in names)


def running_dtype(asked: torch.dtype | str, own: torch.dtype | str | None, device: torch.device | str) -> torch.dtype:
    """What a checkpoint in `own` (None: float32) computes in: `asked`, or for "auto" its own, in float32 where that is
    bfloat16 and the device is not made for it."""
    dtype = as_dtype((own or torch.float32) if asked == "auto" else asked)
    widened = asked == "auto" and dtype == torch.bfloat16 and not multiplies_bfloat16(device)
    return torch.float32 if widened else dtype


def as_dtype(named: torch.dtype | str) -> torch.dtype:
    """torch's, of its name with or without "torch."."""
    found = getattr(torch, named.removeprefix("torch."), None) if isinstance(named, str) else named
    if not isinstance(found, torch.dtype):
        raise ConfigError(f"dtype={named!r}; expected auto, or torch's name of one: float32, bfloat16, float16")
    return found


def in_dtype(state: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """A state on the CPU in `dtype`. Tensors that are one stay one, so that transformers writes a tied table once."""
    keys = {name: (tensor.data_ptr(), tensor.shape, tensor.stride()) for name, tensor in state.items()}
    made = {keys[name]: tensor.detach().to("cpu", dtype) for name, tensor in state.items()}
    return {name: made[key] for name, key in keys.items()}


def autocast_dtype(mixed_precision: str, device: torch.device | str) -> torch.dtype:
    """What a head's layers compute in while it is trained. `mixed_precision`: "auto", "bf16" or "no"."""
    wide = mixed_precision == "no" or (mixed_precision == "auto" and not multiplies_bfloat16(device))
    return torch.float32 if wide else torch.bfloat16


@lru_cache
def say_widened(name: str) -> None:
    """Once per checkpoint: that it runs in float32."""
    logger.warning(
        "%s is in bfloat16 and runs in float32: this CPU has no instructions for it (dtype=bfloat16 insists)", name
    )


def on_device(numbers: Sequence, device: torch.device, dtype: torch.dtype = torch.long) -> Tensor:
    """Numbers, or rows of them, as a tensor of `dtype` on `device`."""
    return torch.tensor(numbers, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on `device`."""
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)
