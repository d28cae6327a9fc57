"""The learning rate over a run, by the share of the budget that is spent."""

from __future__ import annotations

import math

from train.recipe.sections import TrainingSection


def learning_rate(training: TrainingSection, share: float, total_steps: int | None) -> float:
    """Linear warm-up over `warmup_ratio`, then cosine to zero or constant. `share`: 0 to 1; `total_steps`: None for a
    budget of time."""
    peak, warm_up = training.learning_rate, training.warmup_ratio
    if share < warm_up:
        return peak * min(1.0, (share + 1 / max(total_steps or 100, 1)) / warm_up)
    if training.lr_schedule == "constant":
        return peak
    after = (share - warm_up) / max(1 - warm_up, 1e-9)
    return peak * 0.5 * (1 + math.cos(math.pi * min(after, 1.0)))
