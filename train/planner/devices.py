"""The rates and memory of devices, by their makers' data sheets or measured, and the time that work
takes on them.

Peaks are dense (without sparsity), memory is what the maker names in decimal GB, links are bytes
per second in one direction between two devices of one host. The shares of a peak that real code
reaches are assumptions; for a CPU they are fitted to measured runs (scripts/bench_plan.py)."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from speculators.errors import ConfigError

Clock = Callable[[], float]


class Range(NamedTuple):
    """A figure and what it may as well be."""

    low: float
    likely: float
    high: float


REACHED_PRODUCTS = Range(0.25, 0.40, 0.55)  # assumed of accelerators
REACHED_TRANSFERS = Range(0.45, 0.60, 0.80)


@dataclass(frozen=True)
class Device:
    """One device. `flops`: of matrix products, by the dtype of their inputs; per second, as
    `bandwidth` (of memory) and `link` (to another device) are. `call_seconds`: until a small
    operation has been started. `products`, `transfers`: the share of these peaks that is
    reached."""

    name: str
    flops: dict[str, float]
    memory: float  # bytes
    bandwidth: float
    link: float
    kind: str = "cuda"  # as torch calls it
    call_seconds: float = 8e-6
    products: Range = REACHED_PRODUCTS
    transfers: Range = REACHED_TRANSFERS
    context: float = 1.5e9  # bytes that the runtime and its libraries take

    def peak(self, dtype: torch.dtype) -> float:
        """FLOP/s of products in `dtype`."""
        if (
            dtype == torch.float32
            and self.kind == "cuda"
            and torch.get_float32_matmul_precision() != "highest"
        ):
            return self.flops["tf32"]
        return self.flops["float32" if dtype in (torch.float32, torch.float64) else "bfloat16"]


def _table(**rows: tuple[str, float, float, float, float, float, float]) -> dict[str, Device]:
    """Rows of name, dense TFLOP/s in bf16 (and fp16), TF32 and FP32, memory in GB, GB/s of memory
    and of a link."""
    return {
        key.replace("_", "-"): Device(
            name,
            {"bfloat16": bf16 * 1e12, "tf32": tf32 * 1e12, "float32": fp32 * 1e12},
            gb * 1e9,
            bw * 1e9,
            link * 1e9,
        )
        for key, (name, bf16, tf32, fp32, gb, bw, link) in rows.items()
    }


DEVICES = _table(
    h100=("NVIDIA H100 SXM 80 GB", 989.4, 494.7, 66.9, 80, 3350, 450),
    h100_pcie=("NVIDIA H100 PCIe 80 GB", 756, 378, 51.2, 80, 2000, 64),
    h200=("NVIDIA H200 SXM 141 GB", 989.4, 494.7, 66.9, 141, 4800, 450),
    b200=("NVIDIA B200 SXM 179 GB", 2250, 1100, 80, 179, 8000, 900),
    a100_80=("NVIDIA A100 SXM 80 GB", 312, 156, 19.5, 80, 2039, 300),
    a100_40=("NVIDIA A100 SXM 40 GB", 312, 156, 19.5, 40, 1555, 300),
    l40s=("NVIDIA L40S 48 GB", 362, 183, 91.6, 48, 864, 32),
    a10=("NVIDIA A10 24 GB", 125, 62.5, 31.2, 24, 600, 32),
    l4=("NVIDIA L4 24 GB", 121, 60, 30.3, 24, 300, 32),
    rtx4090=("NVIDIA GeForce RTX 4090 24 GB", 165.2, 82.6, 82.6, 24, 1008, 32),
    mi300x=("AMD Instinct MI300X 192 GB", 1307.4, 653.7, 163.4, 192, 5300, 448),
)
CPU = "cpu"
CALL = 10.0  # times the smallest call: what one costs on a CPU, fitted as the shares of it are


def find_device(name: str) -> Device:
    """The device of a key; the CPU is measured, which takes a second or two. ConfigError names the
    keys there are."""
    key = name.lower().replace("_", "-")
    if key == CPU:
        return measure_cpu()
    if key not in DEVICES:
        raise ConfigError(
            f"--gpu {name}: not in the table; expected one of {', '.join(DEVICES)}, {CPU} (this"
            " machine's)"
        )
    return DEVICES[key]


def recognised(name: str, memory: float) -> Device | None:
    """The row of the table for a GPU by the name that its driver gives it and its bytes of memory,
    within a tenth; None if there is none, as for a part of a GPU."""
    spelt = name.lower().replace("rtx ", "rtx")
    named = [key for key in DEVICES if re.search(rf"\b{key.split('-')[0]}\b", spelt)]
    named = [key for key in named if key.endswith("pcie") == ("pcie" in spelt)] or named
    fitting = [DEVICES[key] for key in named if abs(DEVICES[key].memory - memory) <= 0.1 * memory]
    return min(fitting, key=lambda each: abs(each.memory - memory), default=None)


def total_memory(device: torch.device) -> int | None:
    """Bytes of an accelerator of this machine; None for a CPU, whose memory others use too."""
    if device.type == CPU:
        return None
    return int(torch.get_device_module(device).get_device_properties(device).total_memory)


# --------------------------------------------------------------------------------------------- the
# time of work


class Product(NamedTuple):
    """A matrix product or an attention: operations, bytes read and written, and the dtype of its
    inputs."""

    flops: float
    moved: float
    dtype: torch.dtype


@dataclass
class Work:
    """Matrix products, bytes through memory and operations: a vector, as works are added and
    scaled.

    A product takes the time of its arithmetic or of its operands' way through memory, whichever is
    longer (a roofline). Everything else takes the time of its bytes, and every operation a fixed
    start. `products`: how often each is made; `traffic`: bytes read and written by everything else;
    `calls`: operations started; `sent`: bytes to other devices."""

    products: dict[Product, float] = field(default_factory=dict)
    traffic: float = 0.0
    calls: float = 0.0
    sent: float = 0.0

    def __add__(self, other: Work) -> Work:
        products = dict(self.products)
        for product, times in other.products.items():
            products[product] = products.get(product, 0) + times
        return Work(
            products, self.traffic + other.traffic, self.calls + other.calls, self.sent + other.sent
        )

    def __mul__(self, times: float) -> Work:
        products = {product: times * n for product, n in self.products.items()}
        return Work(products, times * self.traffic, times * self.calls, times * self.sent)

    @property
    def flops(self) -> float:
        return sum(product.flops * times for product, times in self.products.items())

    def seconds(self, device: Device) -> Range:
        """The time on one device, from the best to the worst part of its peaks that may be
        reached."""
        return Range(*(self._seconds(device, i) for i in (2, 1, 0)))

    def _seconds(self, device: Device, which: int) -> float:
        reached, bandwidth = device.products[which], device.transfers[which] * device.bandwidth
        computed = self.traffic / bandwidth + sum(
            times * max(p.flops / (reached * device.peak(p.dtype)), p.moved / bandwidth)
            for p, times in self.products.items()
        )
        started = self.calls * device.call_seconds
        # an accelerator computes while the next operations are started
        return (
            computed + started if device.kind == CPU else max(computed, started)
        ) + self.sent / device.link


def total(works: Iterable[Work]) -> Work:
    return sum(works, Work())


# --------------------------------------------------------------------------------------------- this
# machine


def measure_cpu(clock: Clock = time.perf_counter) -> Device:
    """This machine's, with the threads that torch uses: products of a thousand rows, copies beyond
    the caches, small calls. `clock`: seconds, for one thread `time.process_time` where others use
    the machine."""
    import psutil

    rates = {
        str(dtype).removeprefix("torch."): product_rate(dtype, clock)
        for dtype in (torch.float32, torch.bfloat16)
    }
    bandwidth = copy_rate(clock)
    return Device(
        name=f"this machine's CPU, {torch.get_num_threads()} threads",
        flops=rates,
        memory=float(psutil.virtual_memory().total),
        bandwidth=bandwidth,
        link=bandwidth / 2,  # between processes of one host
        kind="cpu",
        call_seconds=CALL * _call_seconds(clock),
        products=Range(0.6, 0.7, 1.0),
        transfers=Range(0.4, 0.6, 1.0),
        context=6e8,
    )


def product_rate(
    dtype: torch.dtype,
    clock: Clock = time.perf_counter,
    width: int = 1024,
    device: torch.device | str = "cpu",
) -> float:
    """FLOP/s of [width, width] products."""
    a, b = (torch.randn(width, width, device=device).to(dtype) for _ in range(2))
    return 2 * width**3 / _fastest(lambda: a @ b, clock, device)


def copy_rate(
    clock: Clock = time.perf_counter, count: int = 1 << 25, device: torch.device | str = "cpu"
) -> float:
    """Bytes per second, read and written."""
    source, target = (torch.zeros(count, device=device) for _ in range(2))
    return 2 * 4 * count / _fastest(lambda: target.copy_(source), clock, device)


def _call_seconds(clock: Clock, calls: int = 300) -> float:
    x = torch.zeros(64)

    def many() -> None:
        for _ in range(calls):
            x.add_(1.0)

    return _fastest(many, clock) / calls


def _fastest(
    work: Callable[[], object],
    clock: Clock,
    device: torch.device | str = "cpu",
    seconds: float = 0.35,
) -> float:
    """Seconds of the fastest repetition, each timed until the device is done: other work of the
    machine only slows."""
    wait = torch.get_device_module(device).synchronize
    work()
    wait()
    best, ends = float("inf"), clock() + seconds
    while clock() < ends:
        began = clock()
        work()
        wait()
        best = min(best, clock() - began)
    return best
