"""A step that failed, done again for each request alone: one request's fault does not touch the others.

What a half-done round left behind is thrown away: every request gives its row back and is computed again from its
committed text. Who fails alone is ended; the others lose time, and not a token.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from inference.engine.engine import Engine
from inference.requests.request import Request
from speculators.errors import DraftsmithError


@dataclass
class Step:
    """What became of one step: who finished, and who could not go on and why."""

    finished: list[Request] = field(default_factory=list)
    failed: list[tuple[Request, Exception]] = field(default_factory=list)


class DeviceLost(DraftsmithError):
    """The device answers nothing any more, as after a failed assertion in one of its kernels: no step can be done again
    in this process."""


def require_answer(device: torch.device, error: Exception) -> None:
    """DeviceLost, from `error`, if the device has stopped answering: such an error is met by whatever asks next."""
    try:
        torch.ones(1, device=device).add_(1).item()
    except RuntimeError:
        reason = str(error).strip().partition("\n")[0]
        raise DeviceLost(f"{device} answers no more ({reason}); start the server again") from error


def guarded_step(engine: Engine) -> Step:
    """One step of the engine; if it fails, one for each request alone, with the random numbers it would have had.

    Raises DeviceLost where that would be in vain."""
    dice = _Dice([*engine.scheduler.running, *engine.scheduler.candidates()])
    try:
        return Step(engine.step())
    except Exception as error:
        require_answer(engine.target.device, error)
        dice.put_back()
        return _apart(engine)


def _apart(engine: Engine) -> Step:
    scheduler = engine.scheduler
    step = Step(engine.preempt_all())
    waiting = list(scheduler.waiting)
    suspects, rest = waiting[: scheduler.max_num_seqs], waiting[scheduler.max_num_seqs :]
    for request in suspects:
        scheduler.waiting.clear()
        scheduler.waiting.append(request)
        dice = _Dice([request])
        try:
            step.finished += engine.step()
        except Exception as error:
            dice.put_back()
            if request.finished:  # all of it is committed
                step.finished.append(request)
            else:
                request.finish_reason = "error"
                step.failed.append((request, error))
        step.finished += [each for each in engine.preempt_all() if each is not request]
    scheduler.waiting.clear()
    scheduler.waiting.extend([each for each in suspects if not each.finished] + rest)
    return step


class _Dice:
    """The generators of some requests as they are now."""

    def __init__(self, requests: list[Request]) -> None:
        self._kept: list[tuple[Request, int, torch.Tensor | None]] = []
        for request in requests:
            state = None if request.generator is None else request.generator.get_state()
            self._kept.append((request, len(request.token_ids), state))

    def put_back(self) -> None:
        """Of those that committed nothing since: what was drawn, and what was noted about it, never was."""
        for request, length, state in self._kept:
            if len(request.token_ids) == length:
                if state is not None and request.generator is not None:
                    request.generator.set_state(state)
                del request.logprobs[length - request.num_prompt_tokens :]
