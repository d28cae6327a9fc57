"""The fused kernels that a GPU computes with, and the switch that goes without them.

`DRAFTSMITH_KERNELS` names the parts that use them on CUDA, separated by commas, or is `none`;
unset, all of PARTS do. A part without its kernels computes the same by torch's operations, one at a
time. A failure of a kernel names this switch, so that a run can go on without it."""

from __future__ import annotations

import logging
import os
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Any, TypeVar

import torch

from draftsmith.speculators.errors import ConfigError, DraftsmithError

logger = logging.getLogger(__name__)

SWITCH = "DRAFTSMITH_KERNELS"
PARTS = {
    "attention": "attention of heads in training, and of a target over packed rows",
    "objective": "loss and gradient of a block of rows in training",
    "layers": "decoder layers of heads in training, before and after their attention",
}
CAPABILITY = (7, 0)  # compute capability that Triton asks for
# Of one function: sizes of 1 have graphs of their own, as have layers that differ in their widths.
MOST_GRAPHS = 64
# Numbers in the tensor that a function reads: with fewer, a training is over before it has saved
# the minute that compiling takes.
LEAST_NUMBERS = 1 << 23
COMPILERS = ("torch._dynamo", "torch._inductor", "torch._functorch", "triton")


Result = TypeVar("Result")


class KernelError(DraftsmithError):
    """A fused kernel could not be compiled, or has failed."""


def enabled(part: str) -> bool:
    """True unless DRAFTSMITH_KERNELS leaves a part of PARTS out. ConfigError: it names another."""
    setting = os.environ.get(SWITCH)
    if setting is None:
        return True
    names = [name.strip() for name in setting.split(",") if name.strip()]
    if unknown := set(names) - {*PARTS, "none"}:
        raise ConfigError(
            f"expected none, or parts of {', '.join(PARTS)}, got {', '.join(sorted(unknown))}",
            where=SWITCH,
        )
    return part in names


def why_not(part: str, device: torch.device) -> str | None:
    """Why a part goes without its kernels on a GPU; None if it does not."""
    if not enabled(part):
        return f"{SWITCH} leaves {part} out"
    if not torch.cuda.is_available():
        return "torch has no CUDA device"
    capability = torch.cuda.get_device_capability(device)
    if capability < CAPABILITY:
        return f"the GPU's compute capability is {capability}, Triton needs {CAPABILITY}"
    return why_not_triton()


@cache
def why_not_triton() -> str | None:
    """Why Triton builds no kernel on this machine; None if it does. It compiles what launches its
    kernels in C, with Python's headers, when it first runs (triton/runtime/build.py)."""
    if find_spec("triton") is None:
        return "Triton is not installed"
    if not (os.environ.get("CC") or which("gcc") or which("clang")):
        return "Triton needs a C compiler: install gcc or clang, or name one in CC"
    headers = Path(sysconfig.get_path("include", scheme="posix_prefix"), "Python.h")
    if not headers.is_file():
        return f"Triton needs Python's headers: {headers} is missing (Debian: python3-dev)"
    return None


def serves(part: str, device: torch.device) -> bool:
    """True if a part runs compiled on the device. Logs once why a GPU goes without."""
    if device.type != "cuda":
        return False
    reason = why_not(part, device)
    if reason is not None:
        log_once(f"{part}: one operation at a time, which is slower: {reason}")
    return reason is None


@cache
def log_once(reason: str) -> None:
    """A warning, the first time that it is given."""
    logger.warning(reason)


def on_device(
    part: str, function: Callable[..., Result], read: torch.Tensor
) -> Callable[..., Result]:
    """`function` of a part, compiled where `read`, its largest tensor, is large and on a device
    that serves the part."""
    compiles = read.numel() >= LEAST_NUMBERS and serves(part, read.device)
    return compiled(part, function) if compiles else function


@cache
def compiled(part: str, function: Callable[..., Result]) -> Callable[..., Result]:
    """`function` of tensors and modules as one graph for tensors of any sizes, compiled when it is
    first called. What its compiler raises becomes a KernelError."""
    as_graph = torch.compile(function, fullgraph=True, dynamic=True)

    def call(*arguments: Any, **options: Any) -> Result:
        with of_compilers(part), torch.compiler.config.patch(recompile_limit=MOST_GRAPHS):  # type: ignore[attr-defined]
            return as_graph(*arguments, **options)

    return call


@contextmanager
def of_part(part: str) -> Iterator[None]:
    """What a kernel of the part raises inside becomes a KernelError, which says how to go without
    it. Memory that is out stays what it is."""
    try:
        yield
    except (DraftsmithError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise _failure(part, error) from error


@contextmanager
def of_compilers(part: str = "") -> Iterator[None]:
    """What a compiler raises inside becomes a KernelError; other errors stay what they are. Without
    a part it is a backward pass, whose kernels are compiled when it first runs."""
    try:
        yield
    except Exception as error:
        if not _of_compilers(error):
            raise
        raise _failure(part, error) from error


def _failure(part: str, error: Exception) -> KernelError:
    others = [name for name in PARTS if name != part] if part else []
    without = ",".join(others) or "none"
    lines = f"{type(error).__name__}: {error}".strip().splitlines()
    return KernelError(
        f"a fused kernel of {part or 'a backward pass'} has failed ({lines[0]}). Set"
        f" {SWITCH}={without} to go on without it, with the same results and more slowly; where"
        f" it works, {SWITCH} is not set",
        where=SWITCH,
    )


def _of_compilers(error: BaseException | None) -> bool:
    """True if the error, or one that it comes from, is a compiler's."""
    while error is not None:
        if type(error).__module__.startswith(COMPILERS):
            return True
        error = error.__cause__
    return False
