"""Devices and dtypes: the meaning of `dtype: auto`, and copies between host and device.

`auto` is the checkpoint's dtype, but float32 in place of bfloat16 on a CPU without bfloat16
instructions. Such a CPU converts every operand first, which takes longer with each row, so that
drafting gains nothing. float32 represents every bfloat16 number exactly."""

from __future__ import annotations

import gc
import logging
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from draftsmith.speculators.errors import ConfigError

logger = logging.getLogger(__name__)

SCALE = "_scale"  # what follows the name of a weight in that of its scales

# Capabilities of x86 and ARM, as torch.cpu.get_capabilities names them; other architectures are
# taken to support bfloat16.
BFLOAT16 = ("avx512_bf16", "amx_bf16", "avx_ne_convert", "avx10_2", "bf16", "sve_bf16")
ARCHITECTURES = ("x86_64", "amd64", "arm64", "aarch64")


# Kinds of accelerators that nothing runs on, and why.
UNSUPPORTED = {"mps": "it has no float64, which sampling and the trainer's sums need"}


def own_device() -> torch.device:
    """Where everything runs unless a device is named: this machine's accelerator if one is
    available and supported, or its CPU."""
    if torch.backends.mps.is_available():  # then it is what torch calls the accelerator
        say_unsupported("mps")
        return torch.device("cpu")
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


@lru_cache
def say_unsupported(kind: str) -> None:
    """Warns, once per process, that this kind of accelerator is left alone."""
    logger.warning("%s is not supported (%s); the CPU is used", kind, UNSUPPORTED[kind])


def free_memory() -> None:
    """Collects garbage and releases the device's cached memory."""
    gc.collect()
    if (device := own_device()).type != "cpu":
        torch.get_device_module(device).empty_cache()


def multiplies_bfloat16(device: torch.device | str) -> bool:
    """True if the device multiplies bfloat16 natively; for a CPU, if this machine's does."""
    if torch.device(device).type != "cpu":
        return True
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    known = capabilities.get("architecture") in ARCHITECTURES
    return not known or any(capabilities.get(name) for name in BFLOAT16)


def running_dtype(
    asked: torch.dtype | str, stored: torch.dtype | str | None, device: torch.device | str
) -> torch.dtype:
    """The dtype that a checkpoint in `stored` (None: float32) is loaded in: `asked`, or for "auto"
    `stored`, with float32 in place of bfloat16 on a device without native bfloat16."""
    dtype = as_dtype((stored or torch.float32) if asked == "auto" else asked)
    widened = asked == "auto" and dtype == torch.bfloat16 and not multiplies_bfloat16(device)
    return torch.float32 if widened else dtype


def as_dtype(named: torch.dtype | str) -> torch.dtype:
    """Returns the torch dtype of a name, with or without "torch."."""
    dtype = getattr(torch, named.removeprefix("torch."), None) if isinstance(named, str) else named
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(
            f"dtype={named!r}; expected auto, or torch's name of one: float32, bfloat16, float16"
        )
    return dtype


def in_dtype(state: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """A state dict on the CPU in `dtype`; tied tensors stay tied."""
    keys = {name: (x.data_ptr(), x.shape, x.stride()) for name, x in state.items()}
    cast = {keys[name]: in_precision(name, tensor, dtype) for name, tensor in state.items()}
    return {name: cast[key] for name, key in keys.items()}


def in_precision(
    name: str, tensor: Tensor, dtype: torch.dtype, exact: tuple[str, ...] = ()
) -> Tensor:
    """A tensor of a state dict on the CPU in `dtype`; int8 weights stay so. Their scales, and what
    ends in one of `exact`, are float32."""
    if not tensor.is_floating_point():
        return tensor.detach().cpu()
    wide = name.endswith((SCALE, *exact))
    return tensor.detach().to("cpu", torch.float32 if wide else dtype)


def autocast_dtype(mixed_precision: str, device: torch.device | str) -> torch.dtype:
    """The dtype of a head's layers during training. `mixed_precision`: "auto", "bf16" or "no"."""
    exact = mixed_precision == "auto" and not multiplies_bfloat16(device)
    wide = exact or mixed_precision == "no"
    return torch.float32 if wide else torch.bfloat16


@lru_cache
def say_widened(name: str) -> None:
    """Warns, once per checkpoint, that it runs in float32."""
    logger.warning(
        "%s is in bfloat16 and runs in float32: this CPU has no instructions for it (dtype=bfloat16"
        " insists)",
        name,
    )


def on_device(numbers: Sequence, device: torch.device, dtype: torch.dtype = torch.long) -> Tensor:
    """Numbers, or rows of them, on a device, through pinned memory, without waiting."""
    return torch.tensor(numbers, dtype=dtype, pin_memory=device.type == "cuda").to(
        device, non_blocking=True
    )


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copies a CPU tensor to a device asynchronously (pinned memory, non_blocking). Neither is
    written to afterwards: `on_host` returns the original."""
    if tensor.device.type == device.type:
        return tensor
    pinned = tensor.contiguous().pin_memory() if device.type == "cuda" else tensor
    copied = pinned.to(device, non_blocking=True)
    copied.original = tensor  # type: ignore[attr-defined]
    return copied


def on_host(tensor: Tensor) -> Tensor:
    """The tensor in the host's memory: what `to_device` copied, without waiting, or a copy."""
    if tensor.device.type == "cpu":
        return tensor
    original = getattr(tensor, "original", None)
    return tensor.cpu() if original is None else original
