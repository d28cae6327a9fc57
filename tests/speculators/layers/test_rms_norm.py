"""The norm in few calls is torch's."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from draftsmith.speculators.layers.rms_norm import MOST_MIRRORED, rms_norm

CLOSE = {torch.float32: 1e-6, torch.bfloat16: 1e-2}
WIDTH = 64


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("rows", [1, 6, MOST_MIRRORED // WIDTH + 1])
@pytest.mark.parametrize("offset", [0.0, 30.0])  # from a mean, which is not subtracted
@pytest.mark.parametrize("scale", [1e-4, 1.0])  # eps counts for the smaller one
def test_rms_norm_of_any_number_of_rows_is_torchs(dtype, rows, offset, scale) -> None:
    generator = torch.Generator().manual_seed(rows)
    x = scale * (torch.randn(1, rows, WIDTH, generator=generator) + offset)
    weight = torch.randn(WIDTH, generator=generator)
    expected = functional.rms_norm(x, x.shape[-1:], weight, 1e-6)
    close = {"rtol": CLOSE[dtype], "atol": CLOSE[dtype]}
    with torch.no_grad():
        actual = rms_norm(x.to(dtype), weight.to(dtype), 1e-6)
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.float(), expected, **(close | {"rtol": 4 * close["rtol"]}))


def test_rms_norm_with_a_weight_per_head_scales_each_head() -> None:
    x = torch.randn(2, 3, 4, 8, generator=torch.Generator().manual_seed(0))
    weight = torch.arange(32.0).view(4, 8)
    expected = functional.rms_norm(x, (8,)) * weight
    with torch.no_grad():
        torch.testing.assert_close(rms_norm(x, weight, torch.finfo(x.dtype).eps), expected)


def test_rms_norm_has_torchs_gradients() -> None:
    x, y = (torch.randn(3, 8, generator=torch.Generator().manual_seed(0)) for _ in range(2))
    x.requires_grad_(True)
    y.requires_grad_(True)
    weight = torch.linspace(0.5, 1.5, 8)
    rms_norm(x, weight, 1e-6).square().sum().backward()
    functional.rms_norm(y, (8,), weight, 1e-6).square().sum().backward()
    torch.testing.assert_close(x.grad, y.grad)
