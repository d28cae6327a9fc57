"""Activation checkpointing: kept for the backward pass, or computed again there."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch.utils.checkpoint import checkpoint

Result = TypeVar("Result")


def kept_or_recomputed(recomputes: bool, work: Callable[..., Result], *arguments) -> Result:
    """Runs `work(*arguments)`; with `recomputes` the backward pass does so again."""
    if recomputes and torch.is_grad_enabled():
        return checkpoint(work, *arguments, use_reentrant=False)
    return work(*arguments)
