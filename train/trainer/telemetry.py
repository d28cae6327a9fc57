"""Costs of training steps: tokens per second, time by phase, memory.

    telemetry.begin() counts = telemetry.saw(batches)         # to be summed over processes with
    telemetry.phase("target"): ...     # around the parts of a step, or @timed("target") on a method
    figures = telemetry.finish(counts, 1)   # of the steps since `begin`

Phases on a GPU are timed by its own events, so that nothing waits for it in between; one that is
under way on another stream when the step ends counts in the next."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar, cast

import psutil
import torch
from torch import Tensor

PHASES = ("data", "target", "drafter", "optimizer")
GIB = 2**30

Method = TypeVar("Method", bound=Callable[..., Any])


def timed(name: str) -> Callable[[Method], Method]:
    """Decorates a method of an object with a `telemetry`: its time counts as that phase's."""

    def wrap(method: Method) -> Method:
        @wraps(method)
        def inner(self: Any, *arguments: Any, **named: Any) -> Any:
            with self.telemetry.phase(name):
                return method(self, *arguments, **named)

        return cast(Method, inner)

    return wrap


class Telemetry:
    """The costs of one process, in these phases:

    data        which rows; with on_policy the texts that are written for them
    target      features of the target
    drafter     unroll, loss and backward; the target's logits for the loss among it
    optimizer   gradients summed over processes, and the step
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._process = psutil.Process()
        self.begin()

    def begin(self) -> None:
        """Begins one step or several; time before it, such as a held-out evaluation, does not
        count."""
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
        """[3] tokens of the batches of a step: of all slots, without padding, with a loss. Each
        batch has `segment_ids` (-1: padding) and `loss_mask`, both [B, T]."""
        masks = [
            (batch.segment_ids.numel(), batch.segment_ids >= 0, batch.loss_mask)
            for batch in batches
        ]
        return torch.tensor(
            [(size, valid.sum(), supervised.sum()) for size, valid, supervised in masks]
        ).sum(0)

    def finish(self, counts: Sequence[float], steps: int) -> dict[str, float]:
        """The figures of the `steps` since `begin`. `counts`: the sum of what `saw` said, over
        steps and processes.

        step_seconds                  wall time of this process, the mean over the steps
        tokens_per_second             of all processes, padding among them: what was computed on
        valid_tokens_per_second       without padding supervised_tokens_per_second  those with a
        loss time/<phase>                  share of the wall time, 0 to 1; time/other: what is left.
        Those of a target that
                                      runs beside the drafter can add up to more
                                      than 1
        memory_gib                    most that the device had in use so far; on a CPU the process's
        memory now"""
        if self._events:
            torch.cuda.current_stream(self.device).synchronize()
            under_way = []
            for name, start, end in self._events:
                if end.query():
                    self._spent[name] += start.elapsed_time(end) / 1000
                else:
                    under_way.append((name, start, end))
            self._events = under_way
        seconds = max(time.perf_counter() - self._began, 1e-9)
        shares = {f"time/{name}": self._spent[name] / seconds for name in PHASES}
        return {
            "step_seconds": seconds / max(steps, 1),
            **dict(
                zip(
                    (f"{kind}tokens_per_second" for kind in ("", "valid_", "supervised_")),
                    (count / seconds for count in counts),
                )
            ),
            **shares,
            "time/other": max(0.0, 1 - sum(shares.values())),
            "memory_gib": self._memory() / GIB,
        }

    def _memory(self) -> int:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return self._process.memory_info().rss
