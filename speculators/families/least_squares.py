"""Linear maps in closed form, from which a head may start. Knows no head."""

from __future__ import annotations

import torch
from torch import Tensor

RIDGE = 1e-3  # of the mean square of the inputs
LEAST_TERMS = 8_192  # terms that a fit should see; more than there are unknowns where the target is wide


def terms_for(inputs: int) -> int:
    """How many terms a fit of a map from so many inputs wants."""
    return max(LEAST_TERMS, 2 * inputs)


def ridge(inputs: Tensor, wanted: Tensor) -> Tensor:
    """[N, I], [N, O] -> [I, O] with the least |inputs W - wanted|² + ridge |W|²; columns weigh by their own size."""
    size = inputs.square().mean(0).sqrt().clamp(min=1e-6)
    scaled = inputs / size
    gram = scaled.T @ scaled
    gram.diagonal().add_(RIDGE * len(inputs))
    return torch.linalg.solve(gram, scaled.T @ wanted) / size[:, None]
