"""What the steps of a training measured: as numbers on the device, as records of the history, and
as what trackers and people read of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

# held-out results: the length, and its standard error
EXPECTED = "expected_acceptance_length"
ERROR = "expected_standard_error"


@dataclass(frozen=True)
class Unread:
    """A step whose results are still on the device."""

    known: dict[str, Any]  # of its record, known to the host
    # float64: `StepLoss`'s sums [2K + 3], tokens (no padding, with a loss) [2], terms
    # [K], the norm of the gradient
    numbers: Tensor

    def read(self, depths: int) -> tuple[dict[str, Any], list[float]]:
        """(the record of the step, tokens [2]). Waits for the device. `depths`: K."""
        sizes = [depths, depths, 2, 1, 2, depths, 1]
        accepted, agreed, lengths, loss, tokens, terms, norm = self.numbers.cpu().split(sizes)
        known = dict(self.known)
        count = terms.clamp(min=1)
        record = {
            "step": known.pop("step"),
            "loss": float(loss),
            **known,
            "grad_norm": float(norm),
            "acceptance_rate": (accepted / count).tolist(),
            "top1_agreement": (agreed / count).tolist(),
            "in_loop_acceptance_length": float(lengths[0] / lengths[1]) if lengths[1] else 1.0,
            "terms": int(terms.sum()),
            "supervised_tokens": int(tokens[-1]),
        }
        if not norm.isfinite():
            record["skipped"] = 1
        return {name: finite(value) for name, value in record.items()}, tokens.tolist()


def finite(value: Any) -> Any:
    """The value, or each of a list, with None for a float that is not finite: JSON has no NaN."""
    if isinstance(value, list):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def held_out_result(history: Sequence[dict[str, Any]], step: int | None = None) -> str:
    """`τ 2.31 ± 0.04 (step 200)` of the evaluation after `step`, or the newest; empty: none."""
    for record in reversed(history):
        if EXPECTED in record and step in (None, record["step"]):
            error = f" ± {record[ERROR]:.2f}" if ERROR in record else ""
            return f"τ {record[EXPECTED]:.2f}{error} (step {record['step']})"
    return ""


def flat(record: dict[str, Any]) -> dict[str, float]:
    """{"acceptance_rate": [a, b]} -> {"acceptance_rate/0": a, ...}, as trackers take it."""
    values: dict[str, float] = {}
    for name, value in record.items():
        if name == "step":
            continue
        if isinstance(value, list):
            values |= {f"{name}/{i}": v for i, v in enumerate(value) if v is not None}
        elif isinstance(value, int | float):
            values[name] = value
    return values
