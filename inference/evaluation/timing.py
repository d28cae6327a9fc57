"""Timing: engines that answer the same prompts in turns.

Times are only compared between engines that ran next to each other. They take turns over a few
prompts at a time, and every turn begins with another engine, so that a machine that slows down
slows all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter

import torch

from draftsmith.inference.outputs import RequestOutput
from draftsmith.inference.report.measurement import compiled_rounds, num_output_tokens
from draftsmith.inference.report.schema import TimedPass

Run = Callable[[range], list[RequestOutput]]  # the responses to the prompts at these places
Clock = Callable[[], float]  # seconds


@dataclass
class Answers:
    """What a run has written in the turns of a repeat, and the seconds that it took."""

    outputs: list[RequestOutput] = field(default_factory=list)
    seconds: float = 0.0

    def timed(self, workload: str, repeat: int) -> TimedPass:
        """As the pass of a repeat."""
        return TimedPass(
            workload=workload,
            repeat=repeat,
            tokens=num_output_tokens(self.outputs),
            seconds=self.seconds,
            compiled_rounds=compiled_rounds([output.metrics for output in self.outputs]),
        )


def turns_of(count: int, at_once: int) -> list[range]:
    """The places of `count` prompts, `at_once` in each turn but the last, which has the rest."""
    return [range(start, min(start + at_once, count)) for start in range(0, count, at_once)]


def interleaved(
    runs: Mapping[str, Run],
    workload: str,
    turns: Sequence[range],
    repeats: int,
    device: torch.device,
    clock: Clock = perf_counter,
) -> Iterator[tuple[str, TimedPass, list[RequestOutput]]]:
    """`repeats` timed passes of each run by its name, with their responses. A pass is all `turns`;
    in a turn every run answers its prompts before any run answers those of the next one.

    The passes of a repeat are there when its last turn has ended. A KeyboardInterrupt goes through;
    before it come, if it is the first repeat that it ends, passes over the turns that all runs have
    answered."""
    names = list(runs)
    begun = 0  # turns
    for repeat in range(repeats):
        answers = {name: Answers() for name in names}
        interrupt = None
        try:
            for turn in turns:
                first = begun % len(names)
                begun += 1
                order = names[first:] + names[:first]
                ended = {name: _timed(runs[name], turn, device, clock) for name in order}
                for name, (outputs, seconds) in ended.items():
                    answers[name].outputs += outputs
                    answers[name].seconds += seconds
        except KeyboardInterrupt as signal:
            interrupt = signal
        whole = interrupt is None
        if whole or (repeat == 0 and all(answer.outputs for answer in answers.values())):
            for name, answer in answers.items():
                yield name, answer.timed(workload, repeat), answer.outputs
        if interrupt is not None:
            raise interrupt


def _timed(
    run: Run, turn: range, device: torch.device, clock: Clock
) -> tuple[list[RequestOutput], float]:
    """The responses to a turn's prompts, and the seconds that they took."""
    _synchronize(device)
    started = clock()
    outputs = run(turn)
    _synchronize(device)
    return outputs, clock() - started


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
