"""The fused kernels that a GPU computes with, and the switch that goes without them.

`DRAFTSMITH_KERNELS` names the parts that use them on CUDA, separated by commas, or is `none`;
unset, all of PARTS do. A part without its kernels computes the same by torch's operations, one at a
time. A failure of a kernel names this switch, so that a run can go on without it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from draftsmith.speculators.errors import ConfigError, DraftsmithError

SWITCH = "DRAFTSMITH_KERNELS"
PARTS = {
    "attention": "attention of heads in training, and of a target over packed rows",
}
COMPILERS = ("torch._dynamo", "torch._inductor", "torch._functorch", "triton")


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
def compiled_backward() -> Iterator[None]:
    """What a compiler raises inside becomes a KernelError: kernels of a backward pass are compiled
    when it first runs. Other errors stay what they are."""
    try:
        yield
    except Exception as error:
        if not _of_compilers(error):
            raise
        raise _failure("", error) from error


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
