"""How many steps fit in a budget of minutes, said as soon as it is known."""

from __future__ import annotations

FEW_STEPS = 20  # optimizer steps; a budget that holds fewer trains nothing to speak of
LONG_STEP = 5.0  # seconds, after which a step tells what it computes
WHAT_TO_CHANGE = (
    "Give more minutes, or make a step shorter: training.batch_size, data.max_length,"
    " drafter.unroll_steps, drafter.draft_vocab_size"
)


def pace_warning(step_seconds: float, minutes: float, spent: float = 0.0, steps: int = 0) -> str:
    """A sentence on a budget in which fewer than FEW_STEPS steps fit; empty if it has room.

    step_seconds    of one step
    minutes         the budget
    spent, steps    seconds and steps before, of which the budget is less"""
    left = max(60 * minutes - spent, 0.0)
    fitting = steps + max(int(left / step_seconds), 0 if steps else 1)
    if fitting >= FEW_STEPS:
        return ""
    fit = "1 step fits" if fitting == 1 else f"{fitting} steps fit"
    return f"one step takes {step_seconds:.0f} s: {fit} in {minutes:g} min. {WHAT_TO_CHANGE}"


def first_step_warning(minutes: float) -> str:
    """Of a first step that has outlived the whole budget and goes on."""
    return (
        f"the first step takes longer than the budget of {minutes:g} min; the run ends after"
        f" it. {WHAT_TO_CHANGE}"
    )
