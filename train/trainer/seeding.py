"""Randomness of its own for a part of a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Draws from torch's global generators inside depend on `seed` alone; outside they go on as if
    nothing had been drawn. `device`: the one that is drawn on, beside the CPU."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield
