"""Linear fits in closed form, which families start their weights from."""

from __future__ import annotations

import torch
from torch import Tensor

RIDGE = 1e-3  # of the mean square of the inputs
LEAST_TERMS = 8_192  # that a fit should see


def terms_for(inputs: int) -> int:
    """Number of terms for a fit of a map from so many inputs."""
    return max(LEAST_TERMS, 2 * inputs)


def ridge(inputs: Tensor, outputs: Tensor) -> Tensor:
    """[N, I], [N, O] -> [I, O] of the least |inputs W - outputs|² + ridge |W|², by column size."""
    size = inputs.square().mean(0).sqrt().clamp(min=1e-6)
    scaled = inputs / size
    gram = scaled.T @ scaled
    gram.diagonal().add_(RIDGE * len(inputs))
    return torch.linalg.solve(gram, scaled.T @ outputs) / size[:, None]


def reduced_rank(inputs: Tensor, matrix: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Factors [I, r], [r, O] of the product of that rank that is closest to `matrix` [I, O] on
    inputs [N, I], in the mean square; inputs @ first factor has unit covariance. (Reduced-rank
    regression: Izenman, 1975.)"""
    gram = inputs.T @ inputs / len(inputs)
    gram.diagonal().add_(RIDGE * gram.diagonal().mean())
    factor = torch.linalg.cholesky(gram)
    U, S, Vh = torch.linalg.svd(factor.T @ matrix, full_matrices=False)
    rank = min(rank, len(S))
    first = torch.linalg.solve_triangular(factor.T, U[:, :rank], upper=True)
    return first, S[:rank, None] * Vh[:rank]


def unit(x: Tensor) -> Tensor:
    """x [..., H] at root mean square 1."""
    return x / x.square().mean(-1, keepdim=True).add(1e-6).sqrt()
