"""Costs of training steps: tokens per second, time by phase, memory.

    telemetry.begin()
    with telemetry.phase("target"): ...
    costs = telemetry.finish(counts, steps)   # of the steps since `begin`

Phases on a GPU are timed by its own events, so that nothing waits for it in between; one that is
under way on another stream when the steps are read counts in the next ones."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psutil
import torch
from torch import Tensor

PHASES = ("data", "target", "drafter", "optimizer")
GIB = 2**30


class Telemetry:
    """The costs of one process, in these phases: data (which rows; on-policy texts written for
    them), target (its features), drafter (unroll, loss and backward, the target's logits among it),
    optimizer (gradients summed over processes, and the step)."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._process = psutil.Process()
        self.begin()

    def begin(self) -> None:
        """Begins one step or several; time before it, as of an evaluation, does not count."""
        self._began, self._spent = time.perf_counter(), defaultdict[str, float](float)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        assert name in PHASES, name
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

    @staticmethod
    def saw(batches: Sequence[Any]) -> Tensor:
        """[3] tokens of the batches of a step: all slots, those without padding, with a loss. A
        batch has `segment_ids` (-1: padding) and `loss_mask`, both [B, T]."""
        return torch.tensor(
            [
                (b.segment_ids.numel(), (b.segment_ids >= 0).sum(), b.loss_mask.sum())
                for b in batches
            ]
        ).sum(0)

    def finish(self, counts: Sequence[float], steps: int) -> dict[str, float]:
        """Seconds per step; tokens per second of all processes, from `counts` (`saw`, summed over
        steps and processes); shares of the time by phase, and what is left (a target that runs
        beside the drafter can make them more than 1); GiB at the peak, on a CPU now."""
        if self._events:
            torch.cuda.current_stream(self.device).synchronize()
            done = [each for each in self._events if each[2].query()]
            for name, start, end in done:
                self._spent[name] += start.elapsed_time(end) / 1000
            self._events = [each for each in self._events if each not in done]
        seconds = max(time.perf_counter() - self._began, 1e-9)
        kinds = ("tokens", "valid_tokens", "supervised_tokens")
        shares = {f"time/{name}": self._spent[name] / seconds for name in PHASES}
        if self.device.type == "cuda":
            memory = torch.cuda.max_memory_allocated(self.device)
        else:
            memory = self._process.memory_info().rss
        return {
            "step_seconds": seconds / max(steps, 1),
            **{f"{kind}_per_second": n / seconds for kind, n in zip(kinds, counts)},
            **shares,
            "time/other": max(0.0, 1 - sum(shares.values())),
            "memory_gib": memory / GIB,
        }
