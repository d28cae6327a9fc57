"""`speculators train`, the trainer of vLLM's library, on a CPU and for minutes in place of steps.

    python -P peer_trainer.py MINUTES ARGUMENTS...

runs in the library's own environment. ARGUMENTS are those of its command. Model, loss, packing,
optimizer and the shape of the schedule are the library's: its rate follows the share of the minutes
that is spent, where it would follow the share of the steps. A minute is a minute of CPU time of
this process, from the first step on. Nothing is validated or saved within it. With
`--hidden-states-dtype=float32` its Muon multiplies in float32 as well; in bfloat16, as it would, a
step takes half a minute on a CPU that has no instructions for that. Afterwards the last weights lie
in `export` below `--save-path`, as the library saves them, and in `counts.json` the steps, the
supervised tokens that they saw, and the minutes."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
from speculators.train import cli, trainer
from speculators.train.config import TrainConfig
from torch.optim import _muon

UNITS = 100_000  # that the schedule divides the minutes into


class TrainerByClock(trainer.Trainer):
    """The library's, on a CPU, until its minutes are spent."""

    minutes = 0.0

    def run_training(self) -> None:
        """Trains for as long as `minutes` says, and saves."""
        self.device_type = "cpu"
        self.tokens = 0
        self.model.register_forward_pre_hook(self._count, with_kwargs=True)
        self.began = time.process_time()
        epoch = 0
        while self.share < 1:
            self.train_epoch(epoch, step_callback=self._stop_in_time)
            epoch += 1
        spent = (time.process_time() - self.began) / 60
        self.checkpointer.save_checkpoint(self.model, self.optimizers, "export")
        counts = {"steps": self.global_step, "tokens": self.tokens, "minutes": spent}
        (self.checkpointer.path / "counts.json").write_text(json.dumps(counts))

    @property
    def share(self) -> float:
        """Of the minutes that are spent."""
        return (time.process_time() - self.began) / (60 * self.minutes)

    def _count(self, _: Any, __: Any, batch: dict[str, Any]) -> None:
        self.tokens += int(batch["loss_mask"].sum())

    def _stop_in_time(self) -> None:
        if self.share >= 1:
            self.config = self.config._replace(max_steps=self.global_step)

    def _schedulers_step(self) -> None:
        for scheduler in self.schedulers:
            scheduler.last_epoch = int(min(self.share, 1) * UNITS) - 1  # `step` adds one
            scheduler.step()


def orthogonalised(
    grad: torch.Tensor, ns_coefficients: tuple[float, float, float], ns_steps: int, eps: float
) -> torch.Tensor:
    """The Newton-Schulz iterations of torch's Muon, in the dtype of `grad`."""
    linear, cubic, quintic = ns_coefficients
    tall = grad.size(0) > grad.size(1)
    x = grad.T if tall else grad
    x = x / x.norm().clamp(min=eps)
    for _ in range(ns_steps):
        gram = x @ x.T
        x = torch.addmm(x, cubic * gram + quintic * gram @ gram, x, beta=linear)
    return x.T if tall else x


def main(minutes: str, *arguments: str) -> None:
    """The library's command, with its trainer by the clock."""
    torch.set_num_threads(1)
    if "--hidden-states-dtype=float32" in arguments:
        _muon._zeropower_via_newtonschulz = orthogonalised
    # It takes for granted that there is an accelerator.
    torch.accelerator.synchronize = lambda *_: None
    trainer.get_local_rank = lambda: "cpu"
    TrainerByClock.minutes = float(minutes)
    cli.Trainer = TrainerByClock
    cli.main(TrainConfig.resolve([*arguments, "--scheduler-total-steps", str(UNITS)]))


if __name__ == "__main__":
    main(*sys.argv[1:])
