"""The norm of draft heads: the same with and without gradients, in every precision."""

from __future__ import annotations

import pytest
import torch

from speculators.layers.decoder import RMSNorm


@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-5), (torch.bfloat16, 2**-7)])
@pytest.mark.parametrize("size", [1e-4, 1.0, 300.0])
@pytest.mark.parametrize("shape", [(1, 1, 32), (2, 5, 7, 16), (3, 0, 8)])
def test_norm_is_the_root_mean_square(shape, size, dtype, close) -> None:
    generator = torch.Generator().manual_seed(0)
    x = (size * torch.randn(shape, generator=generator) + size).to(dtype)  # not centred
    norm = RMSNorm(shape[-1], eps=1e-6)
    norm.weight.data.uniform_(0.5, 2, generator=generator)
    exact = x.double()
    mean = exact.square().mean(-1, keepdim=True)
    expected = exact * (mean + 1e-6).rsqrt() * norm.weight.to(dtype).double()
    torch.testing.assert_close(norm(x).double(), expected, atol=2e-6, rtol=2 * close)
    with torch.inference_mode():
        torch.testing.assert_close(norm(x).double(), expected, atol=2e-6, rtol=2 * close)
