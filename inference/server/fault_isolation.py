"""Repeats a failed step for each request alone, so that the fault of one request does not touch the
others.

The state of the failed round is discarded: all requests lose their rows and are computed again from
their committed text. A request that fails alone is aborted; the others lose time and no token."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch

from inference.engine.engine import Engine
from inference.requests.request import Request
from speculators.errors import DraftsmithError


@dataclass
class Step:
    """The requests that finished in a step, and those that failed with their errors."""

    finished: list[Request]
    failed: list[tuple[Request, Exception]]


class DeviceLost(DraftsmithError):
    """The device no longer computes, as after a failed assertion in a kernel; this process cannot
    repeat a step."""


def guarded_step(engine: Engine) -> Step:
    """One step of the engine; if it fails, one step for each request alone with the same random
    numbers. DeviceLost if the device cannot go on."""
    snapshot = _Snapshot([*engine.scheduler.running, *engine.scheduler.candidates()])
    try:
        return Step(engine.step(), [])
    except Exception as error:
        device = engine.target.device
        try:
            torch.ones(1, device=device).add_(1).item()
        except RuntimeError:
            reason = str(error).strip().partition("\n")[0]
            raise DeviceLost(
                f"{device} answers no more ({reason}); start the server again"
            ) from error
        snapshot.restore()
        return _step_one_by_one(engine)


def _step_one_by_one(engine: Engine) -> Step:
    scheduler = engine.scheduler
    step = Step(engine.preempt_all(), [])
    waiting = list(scheduler.waiting)
    suspects, others = waiting[: scheduler.max_num_seqs], waiting[scheduler.max_num_seqs :]
    for request in suspects:
        scheduler.waiting = deque([request])
        snapshot = _Snapshot([request])
        try:
            step.finished += engine.step()
        except Exception as error:
            snapshot.restore()
            if request.finished:  # all of it is committed
                step.finished.append(request)
            else:
                request.finish_reason = "error"
                step.failed.append((request, error))
        step.finished += [other for other in engine.preempt_all() if other is not request]
    scheduler.waiting = deque([request for request in suspects if not request.finished] + others)
    return step


class _Snapshot:
    """The random state and the length of some requests."""

    def __init__(self, requests: list[Request]) -> None:
        self._states = [
            (
                request,
                len(request.token_ids),
                None if request.generator is None else request.generator.get_state(),
            )
            for request in requests
        ]

    def restore(self) -> None:
        """Takes back draws and log-probabilities of the requests that committed nothing since."""
        for request, length, state in self._states:
            if len(request.token_ids) == length:
                if state is not None and request.generator is not None:
                    request.generator.set_state(state)
                del request.logprobs[length - request.num_prompt_tokens :]
