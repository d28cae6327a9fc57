"""The norm of draft heads: the same with and without gradients, in every shape it is asked for."""

from __future__ import annotations

import pytest
import torch

from speculators.layers.decoder import RMSNorm, rms_norm


def reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    exact = x.double()
    return exact * (exact.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()


@pytest.mark.parametrize("size", [1e-4, 1.0, 300.0])
@pytest.mark.parametrize("shape", [(1, 1, 32), (2, 5, 7, 16), (3, 0, 8), (2, 40, 128)])
def test_norm_is_the_root_mean_square(shape, size) -> None:
    generator = torch.Generator().manual_seed(0)
    x = size * torch.randn(shape, generator=generator) + size  # not centred
    norm = RMSNorm(shape[-1], eps=1e-6)
    norm.weight.data.uniform_(-2, 2, generator=generator)
    wanted = reference(x, norm.weight, 1e-6).float()
    torch.testing.assert_close(norm(x), wanted, atol=2e-6, rtol=1e-5)
    with torch.inference_mode():
        torch.testing.assert_close(norm(x), wanted, atol=2e-6, rtol=1e-5)


def test_a_weight_per_head() -> None:
    for length in (3, 300):
        x, weight = torch.randn(2, length, 4, 8), torch.randn(4, 8)
        with torch.no_grad():
            found = rms_norm(x, weight, 1e-6)
        torch.testing.assert_close(found, reference(x, weight, 1e-6).float(), atol=2e-6, rtol=1e-5)


def test_bfloat16_is_as_close_as_bfloat16_can_be() -> None:
    x, weight = torch.randn(64, 256).bfloat16(), torch.rand(256).bfloat16() + 0.5
    with torch.no_grad():
        error = rms_norm(x, weight, 1e-6).double() / reference(x, weight, 1e-6) - 1
    assert error.abs().max() < 2**-7


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_frozen_norm_is_the_same_until_it_thaws(dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x, norm = (
        torch.randn((2, 3, 32), generator=generator).to(dtype),
        RMSNorm(32, eps=1e-6).to(dtype),
    )
    norm.weight.data.uniform_(-2, 2, generator=generator)
    with torch.inference_mode():
        wanted = norm(x)
    norm.freeze()
    with torch.inference_mode():
        torch.testing.assert_close(
            norm(x), wanted, atol=2e-6, rtol=1e-5 if dtype == torch.float32 else 2**-6
        )
        assert norm(x.double()).dtype == torch.float64
    assert norm(x).requires_grad
    norm.weight.data.mul_(2)
    norm.thaw()
    with torch.inference_mode():
        torch.testing.assert_close(
            norm(x), 2 * wanted, atol=2e-6, rtol=1e-5 if dtype == torch.float32 else 2**-6
        )
