"""Costs of training steps: tokens per second, time by phase, memory.

Phases on a GPU are timed by its own events, so that nothing waits for it in between."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import psutil
import torch

PHASES = ("data", "target", "drafter", "optimizer")
GIB = 2**30


class Telemetry:
    """The costs of one process, in these phases: data (which rows; on-policy texts written for
    them), target (its features), drafter (unroll, loss and backward, among it the target's logits
    and the sums of gradients over processes), optimizer (its step)."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._began = time.perf_counter()
        self._spent = defaultdict[str, float](float)  # seconds by phase

    def begin(self) -> None:
        """Begins one step or several; time before it, as of an evaluation, does not count."""
        self._began = time.perf_counter()
        self._spent = defaultdict[str, float](float)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What runs inside counts as a phase, one of PHASES."""
        if self.device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            yield
            end.record()
            self._events.append((name, start, end))
            return
        began = time.perf_counter()
        yield
        self._spent[name] += time.perf_counter() - began

    def finish(self, tokens: Sequence[float], steps: int, waited: float = 0.0) -> dict[str, float]:
        """Seconds per step; tokens per second, of `tokens` (those that are no padding, those with a
        loss, of all processes and steps); the share of the time by phase, and of that in which
        nothing was done but to wait for features that are read elsewhere, `waited` seconds; GiB at
        the peak (CPU: now)."""
        if self._events:
            torch.cuda.current_stream(self.device).synchronize()
            for name, start, end in self._events:
                self._spent[name] += start.elapsed_time(end) / 1000
            self._events = []
        seconds = max(time.perf_counter() - self._began, 1e-9)
        memory = psutil.Process().memory_info().rss
        if self.device.type == "cuda":
            memory = torch.cuda.max_memory_allocated(self.device)
        return {
            "step_seconds": seconds / max(steps, 1),
            "tokens_per_second": tokens[0] / seconds,
            "supervised_tokens_per_second": tokens[1] / seconds,
            **{f"time/{name}": self._spent[name] / seconds for name in PHASES},
            "waits": waited / seconds,
            "memory_gib": memory / GIB,
        }
