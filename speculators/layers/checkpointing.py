"""Activations kept for the backward pass, or computed again there."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch.utils.checkpoint import checkpoint

Result = TypeVar("Result")


def kept_or_recomputed(recomputes: bool, work: Callable[..., Result], *arguments) -> Result:
    """`work(*arguments)`; with `recomputes`, its backward pass runs it a second time instead of keeping what is
    inside."""
    if recomputes and torch.is_grad_enabled():
        return checkpoint(work, *arguments, use_reentrant=False)
    return work(*arguments)
