"""Rates and memory of devices: of accelerators by their makers' data sheets, of this machine's CPU
by a short measurement."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Literal

import psutil
import torch

from draftsmith.speculators.errors import ConfigError
from draftsmith.speculators.precision import own_device

SHARE_OF_PEAK = 0.4  # of products and of memory bandwidth; an assumption
CONTEXT = 1.5e9  # bytes that the runtime and its libraries take on a device

CPU = "cpu"  # the key of this machine's
SHARE_OF_MEASURED = 0.5  # of a CPU's measured rates; an assumption
MEASURED_SECONDS = 0.2  # of each rate
PRODUCT = 1024  # rows and columns of the matrices that are multiplied
COPIED = 64 * 2**20  # bytes that are copied, more than caches hold


@dataclass(frozen=True)
class Device:
    """Dense FLOP/s in bfloat16 and in float32, bytes of memory, and bytes per second of it.

    `share` of these rates is what a run is taken to reach; `rates`: where they are from."""

    name: str
    bfloat16: float
    float32: float
    memory: float
    bandwidth: float
    share: float = SHARE_OF_PEAK
    rates: str = "the peak rates"
    kind: Literal["cuda", "cpu"] = "cuda"

    def peak(self, dtype: torch.dtype) -> float:
        """FLOP/s of products in a dtype."""
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
    """The device of a key of DEVICES, or this machine's CPU. ConfigError names the keys."""
    if name == CPU:
        return this_cpu()
    if name not in DEVICES:
        raise ConfigError(f"expected one of {', '.join([CPU, *DEVICES])}", where=f"--gpu {name}")
    return DEVICES[name]


def this_machine() -> Device | None:
    """The device that a run here uses; None for an accelerator without a data sheet here."""
    device = own_device()
    if device.type == "cpu":
        return this_cpu()
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    return device_called(properties.name, properties.total_memory)


def device_called(name: str, memory: float) -> Device | None:
    """The device of DEVICES by the name that its driver reports, such as "NVIDIA A100-SXM4-40GB";
    of several the one that is closest to `memory`, in bytes."""
    words = re.findall(r"[a-z0-9]+", name.lower().replace("rtx ", "rtx"))
    known = [device for key, device in DEVICES.items() if key.partition("-")[0] in words]
    return min(known, key=lambda device: abs(device.memory - memory), default=None)


@cache
def this_cpu() -> Device:
    """This machine's CPU, by products of matrices and copies of memory on the threads that torch
    uses; it takes about a second."""
    bfloat16 = _product_rate(torch.bfloat16)
    float32 = _product_rate(torch.float32)
    source = torch.ones(COPIED, dtype=torch.uint8)
    copy = torch.zeros_like(source)
    bandwidth = 2 * COPIED / _seconds(lambda: copy.copy_(source))  # read, and written
    measured = (
        f"the rates of {torch.get_num_threads()} threads here, measured just now:"
        f" {bfloat16 / 1e9:,.0f} GFLOP/s in bfloat16, {float32 / 1e9:,.0f} in float32,"
        f" {bandwidth / 1e9:,.1f} GB/s of memory"
    )
    return Device(
        "this machine's CPU",
        bfloat16,
        float32,
        float(psutil.virtual_memory().total),
        bandwidth,
        share=SHARE_OF_MEASURED,
        rates=measured,
        kind="cpu",
    )


def _product_rate(dtype: torch.dtype) -> float:
    """FLOP/s of products of matrices."""
    matrix = torch.ones(PRODUCT, PRODUCT, dtype=dtype)
    return 2 * PRODUCT**3 / _seconds(lambda: matrix @ matrix)


def _seconds(work: Callable[[], object]) -> float:
    """The median time of `work`, which is repeated for MEASURED_SECONDS after a first time."""
    work()
    times = list[float]()
    while sum(times) < MEASURED_SECONDS or len(times) < 3:
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2]
