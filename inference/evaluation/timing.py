"""Timing: interleaved passes of one workload through several engines.

Wall-clock comparisons are only made between runs that were next to each other, and in alternating
order, so that a machine that slows down slows both."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from time import perf_counter

import torch

from draftsmith.inference.outputs import RequestOutput
from draftsmith.inference.report.measurement import compiled_rounds, num_output_tokens
from draftsmith.inference.report.schema import TimedPass

Run = Callable[[], list[RequestOutput]]  # does one pass


def interleaved(
    runs: Mapping[str, Run], workload: str, repeats: int, device: torch.device
) -> Iterator[tuple[str, TimedPass]]:
    """`repeats` timed passes of each run by its name, one right after the other, every other repeat
    in reverse order. Each is there when it has ended, so that a stop loses none."""
    for repeat in range(repeats):
        for name in list(runs) if repeat % 2 == 0 else list(runs)[::-1]:
            _synchronize(device)
            started = perf_counter()
            written = runs[name]()
            _synchronize(device)
            seconds = perf_counter() - started
            ended = TimedPass(
                workload=workload,
                repeat=repeat,
                tokens=num_output_tokens(written),
                seconds=seconds,
                compiled_rounds=compiled_rounds([output.metrics for output in written]),
            )
            yield name, ended


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
