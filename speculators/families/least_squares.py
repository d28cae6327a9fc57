"""Linear fits in closed form, which families start their weights from."""

from __future__ import annotations

import torch
from torch import Tensor

RIDGE = 1e-3  # of the mean square of the inputs
MLP_RIDGE = 0.1  # the same of an MLP's inner state, whose parts are many
LEAST_TERMS = 8_192  # that a fit should see


def terms_for(inputs: int) -> int:
    """Number of terms for a fit of a map from so many inputs."""
    return max(LEAST_TERMS, 2 * inputs)


def fit_bytes(terms: int, numbers: int, inputs: int) -> int:
    """Bytes of a fit in float32, about: `numbers` for each of its terms, and three matrices [I, I]
    of the most inputs that it solves for."""
    return 4 * (terms * numbers + 3 * inputs**2)


def fit_flops(terms: int, inputs: int, outputs: int) -> int:
    """FLOPs of a regression, about: its products [I, N] [N, I] and [I, N] [N, O]."""
    return 2 * terms * inputs * (inputs + outputs)


class Regression:
    """A ridge regression whose terms come in parts."""

    def __init__(self, strength: float = RIDGE) -> None:
        """`strength`: of the mean square of the inputs."""
        self.strength = strength
        self.terms = 0
        self.gram: Tensor | float = 0.0  # [I, I] of the inputs
        self.product: Tensor | float = 0.0  # [I, O] of inputs and outputs

    def add(self, inputs: Tensor, outputs: Tensor) -> None:
        """Terms [N, I], [N, O]."""
        self.terms += len(inputs)
        self.gram = inputs.T @ inputs + self.gram
        self.product = inputs.T @ outputs + self.product

    def solve(self) -> Tensor:
        """[I, O] of the least |inputs W - outputs|² + strength |W|², by column size."""
        assert isinstance(self.gram, Tensor) and isinstance(self.product, Tensor), "no terms"
        size = (self.gram.diagonal() / self.terms).sqrt().clamp(min=1e-6)
        scaled = self.gram / size / size[:, None]
        scaled.diagonal().add_(self.strength * self.terms)
        return torch.linalg.solve(scaled, self.product / size[:, None]) / size[:, None]


def ridge(inputs: Tensor, outputs: Tensor, strength: float = RIDGE) -> Tensor:
    """[N, I], [N, O] -> [I, O] of the least |inputs W - outputs|² + strength |W|², by column
    size."""
    regression = Regression(strength)
    regression.add(inputs, outputs)
    return regression.solve()


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
