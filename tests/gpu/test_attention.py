"""The kernels of attention on a GPU, forward and backward, against the walk over rows."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from draftsmith.speculators.layers import flex_attention as flex
from draftsmith.speculators.layers.attention import attention
from tests.support.attention_cases import (
    KINDS,
    output_and_gradients,
    random_queries,
    random_tensors,
)

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("kind, window", product(KINDS, (None, 3)))
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-4), (torch.bfloat16, 2e-2)])
def test_attention_of_the_device_is_the_walk_in_double_precision(
    device, report, kind, window, dtype, tolerance
):
    """Output and all gradients, by the norm of the error; on a CPU it is the walk's own error."""
    exact_queries = random_queries(kind, window, seed=4)
    queries = random_queries(kind, window, seed=4, device=device.type)
    error = 0.0
    for pairs in {1, KINDS[kind]}:
        tensors = random_tensors(queries, pairs, dtype, head_dim=64)
        exact = [x.cpu().double() for x in tensors]
        if device.type == "cuda":
            assert flex.why_not(tensors[0], tensors[2]) is None
        results = output_and_gradients(attention, tensors, queries)
        expected = output_and_gradients(attention, exact, exact_queries)
        for got, value in zip(results, expected, strict=True):
            difference = (got.cpu().double() - value).norm() / value.norm()
            error = max(error, difference.item())
    report(relative_error=error)
    assert error < tolerance
