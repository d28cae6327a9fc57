"""The rows of a step and of each process: a function of the step, on any number of processes.

The rows of a step are the next `rows_per_step` of an endless stream. They are cut into micro-steps,
which processes take in turn, so that with a global batch size the union over processes is the same
for any number of them. Random numbers belong to a row's place in the stream."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch

from draftsmith.speculators.errors import ConfigError
from draftsmith.train.recipe.sections import TrainingSection


@dataclass(frozen=True)
class MicroStep:
    """`places` are its rows' positions in the stream, `number` counts batches of the step."""

    places: range
    number: int


class StepRows:
    """The micro-steps of one process. ConfigError if the global batch cannot be shared out."""

    def __init__(self, training: TrainingSection, process: int = 0, processes: int = 1) -> None:
        self.seed = training.seed
        self.batch_size = training.batch_size
        self.process = process
        self.processes = processes
        requested = training.global_batch_size
        if requested is None:
            self.rows = training.batch_size
            self.micro_steps = training.gradient_accumulation_steps
        else:
            if requested % processes:
                raise ConfigError(
                    f"{requested} rows cannot be shared by {processes}"
                    " processes; choose a multiple, or another number of processes",
                    where="training.global_batch_size",
                )
            share = requested // processes
            self.rows = max(
                rows for rows in range(1, min(share, training.batch_size) + 1) if share % rows == 0
            )
            self.micro_steps = share // self.rows
        self.rows_per_step = self.rows * self.micro_steps * processes

    def of(self, step: int) -> list[MicroStep]:
        """This process's micro-steps of a step."""
        begin = step * self.rows_per_step
        places = range(begin, begin + self.rows_per_step)
        cut = [places[i : i + self.rows] for i in range(0, self.rows_per_step, self.rows)]
        micro_steps = [MicroStep(*both) for both in zip(cut, self.numbers(), strict=True)]
        return micro_steps[self.process :: self.processes]

    def numbers(self) -> list[int]:
        """The numbers of a step's micro-steps, over all processes."""
        return [m * self.rows // self.batch_size for m in range(self.micro_steps * self.processes)]

    def seeds(self, places: range) -> torch.Tensor:
        """[B] seeds of each row's random numbers."""
        return torch.tensor([_seed("row", self.seed, place) for place in places])

    def seed_everything(self, places: range) -> None:
        """Seeds torch's global state, which dropout draws from, by the micro-step."""
        torch.manual_seed(_seed("micro-step", self.seed, places.start))


def _seed(*parts: object) -> int:
    return int.from_bytes(hashlib.sha256("/".join(map(str, parts)).encode()).digest()[:7], "big")
