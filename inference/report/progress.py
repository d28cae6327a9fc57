"""How far a drafter is trained: the trend of its held-out acceptance over the tokens seen."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from inference.report.schema import HeldOutPoint, TrainingProgress

DOUBLINGS = 2  # the trend is that of the evaluations in the last so many doublings of the tokens


def training_progress(history: Sequence[Mapping[str, Any]]) -> TrainingProgress | None:
    """The progress of a training loop's records, one per step; None where they do not count
    tokens."""
    tokens, points = 0, []
    for steps, record in enumerate(history, 1):
        if "supervised_tokens" not in record:  # records of an earlier version
            return None
        tokens += record["supervised_tokens"]
        if (length := record.get("expected_acceptance_length")) is not None:
            error = record.get("expected_standard_error")
            error = error if error is not None and math.isfinite(error) else None
            points.append(
                HeldOutPoint(
                    step=steps,
                    supervised_tokens=tokens,
                    acceptance_length=length,
                    standard_error=error,
                )
            )
    if not tokens:
        return None
    late = [point for point in points if point.supervised_tokens * 2**DOUBLINGS >= tokens]
    gain, error = _slope(late) if len(late) > 2 else (None, None)
    return TrainingProgress(
        steps=len(history),
        supervised_tokens=tokens,
        held_out=points,
        gain_per_doubling=gain,
        gain_standard_error=error,
    )


def _slope(points: Sequence[HeldOutPoint]) -> tuple[float, float]:
    """The slope of τ in log2(tokens) and its standard error, n - 2 degrees of freedom."""
    x = np.log2([point.supervised_tokens for point in points])
    y = np.array([point.acceptance_length for point in points])
    x = x - x.mean()
    spread = float(x @ x)
    slope = float(x @ y) / spread
    residuals = y - y.mean() - slope * x
    return slope, math.sqrt(float(residuals @ residuals) / (len(points) - 2) / spread)
