"""Peak rates and memory of accelerators, by their makers' data sheets."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from draftsmith.speculators.errors import ConfigError

SHARE_OF_PEAK = 0.4  # of products and of memory bandwidth; an assumption
CONTEXT = 1.5e9  # bytes that the runtime and its libraries take on a device


@dataclass(frozen=True)
class Device:
    """One device: dense FLOP/s of matrix products in bfloat16 and in float32, bytes of memory, and
    bytes per second of memory."""

    name: str
    bfloat16: float
    float32: float
    memory: float
    bandwidth: float

    def peak(self, dtype: torch.dtype) -> float:
        return self.float32 if dtype == torch.float32 else self.bfloat16


DEVICES = {  # TFLOP/s in bfloat16 and float32, GB, GB/s
    key: Device(name, bf16 * 1e12, fp32 * 1e12, gb * 1e9, bandwidth * 1e9)
    for key, name, bf16, fp32, gb, bandwidth in (
        ("h100", "NVIDIA H100 SXM 80 GB", 989.4, 66.9, 80, 3350),
        ("h200", "NVIDIA H200 SXM 141 GB", 989.4, 66.9, 141, 4800),
        ("b200", "NVIDIA B200 SXM 179 GB", 2250, 80, 179, 8000),
        ("a100-80", "NVIDIA A100 SXM 80 GB", 312, 19.5, 80, 2039),
        ("a100-40", "NVIDIA A100 SXM 40 GB", 312, 19.5, 40, 1555),
        ("l40s", "NVIDIA L40S 48 GB", 362, 91.6, 48, 864),
        ("l4", "NVIDIA L4 24 GB", 121, 30.3, 24, 300),
        ("rtx4090", "NVIDIA GeForce RTX 4090 24 GB", 165.2, 82.6, 24, 1008),
        ("mi300x", "AMD Instinct MI300X 192 GB", 1307.4, 163.4, 192, 5300),
    )
}


def find_device(name: str) -> Device:
    """The device of a key of DEVICES. ConfigError names the keys."""
    if name not in DEVICES:
        raise ConfigError(f"expected one of {', '.join(DEVICES)}", where=f"--gpu {name}")
    return DEVICES[name]
