"""Peak rates and memory of accelerators, by their makers' data sheets."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from draftsmith.speculators.errors import ConfigError

SHARE_OF_PEAK = 0.4  # of products and of memory bandwidth; an assumption
CONTEXT = 1.5e9  # bytes that the runtime and its libraries take on a device


@dataclass(frozen=True)
class Device:
    """Dense FLOP/s in bfloat16 and in float32, bytes of memory, and bytes per second of it."""

    name: str
    bfloat16: float
    float32: float
    memory: float
    bandwidth: float

    def peak(self, dtype: torch.dtype) -> float:
        return self.float32 if dtype == torch.float32 else self.bfloat16


DEVICES = {
    "h100": Device("NVIDIA H100 SXM 80 GB", 989.4e12, 66.9e12, 80e9, 3350e9),
    "h200": Device("NVIDIA H200 SXM 141 GB", 989.4e12, 66.9e12, 141e9, 4800e9),
    "b200": Device("NVIDIA B200 SXM 179 GB", 2250e12, 80e12, 179e9, 8000e9),
    "a100-80": Device("NVIDIA A100 SXM 80 GB", 312e12, 19.5e12, 80e9, 2039e9),
    "a100-40": Device("NVIDIA A100 SXM 40 GB", 312e12, 19.5e12, 40e9, 1555e9),
    "l40s": Device("NVIDIA L40S 48 GB", 362e12, 91.6e12, 48e9, 864e9),
    "l4": Device("NVIDIA L4 24 GB", 121e12, 30.3e12, 24e9, 300e9),
    "rtx4090": Device("NVIDIA GeForce RTX 4090 24 GB", 165.2e12, 82.6e12, 24e9, 1008e9),
    "mi300x": Device("AMD Instinct MI300X 192 GB", 1307.4e12, 163.4e12, 192e9, 5300e9),
}


def find_device(name: str) -> Device:
    """The device of a key of DEVICES. ConfigError names the keys."""
    if name not in DEVICES:
        raise ConfigError(f"expected one of {', '.join(DEVICES)}", where=f"--gpu {name}")
    return DEVICES[name]
