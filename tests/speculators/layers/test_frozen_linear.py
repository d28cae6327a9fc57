"""Frozen linear layers: the numbers of the layers they stand for, until these may change."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from draftsmith.speculators.layers import frozen_linear
from draftsmith.speculators.layers.frozen_linear import (
    MOST_TURNED,
    FrozenLinear,
    freeze_linears,
    thaw_linears,
    turned_linear,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 16), (0, 16), (2, 3, 16), (1, 0, 16)], ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_frozen_linear_answers_as_its_layers_do(dtype, shape, bias) -> None:
    linears = [nn.Linear(16, width, bias=bias).to(dtype) for width in (8, 24, 4)]
    x = torch.randn(*shape[:-1], 20).to(dtype)[..., 2:18]
    with torch.inference_mode():
        expected = torch.cat([linear(x) for linear in linears], dim=-1)
        close = {"atol": 2e-3, "rtol": 2e-2} if dtype == torch.bfloat16 else {}
        torch.testing.assert_close(FrozenLinear(*linears)(x), expected, **close)


@pytest.mark.parametrize("rows", [1, 2, MOST_TURNED, MOST_TURNED + 1])
@pytest.mark.parametrize("bias", [False, True])
def test_a_few_rows_are_turned_where_that_is_faster(monkeypatch, rows, bias) -> None:
    monkeypatch.setattr(frozen_linear, "can_turn", lambda weight: True)
    calls = []

    def turned(*arguments):
        calls.append(len(arguments[0]))
        return turned_linear(*arguments)

    monkeypatch.setattr(frozen_linear, "turned_linear", turned)
    linear = nn.Linear(16, 24, bias=bias)
    x = torch.randn(1, rows, 16)
    with torch.inference_mode():
        actual = FrozenLinear(linear)(x)
        torch.testing.assert_close(actual, linear(x))
    assert actual.is_contiguous()
    assert calls == ([rows] if 1 < rows <= MOST_TURNED else [])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_thaw_linears_gives_the_layers_back(dtype: torch.dtype) -> None:
    module = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4)).to(dtype)
    x = torch.randn(1, 16).to(dtype)
    freeze_linears(module)
    with torch.inference_mode():
        before = module(x)
    with torch.no_grad():
        module[0].weight.mul_(2)
    thaw_linears(module)
    with torch.inference_mode():
        assert not torch.equal(module(x), before)
    assert "forward" not in module[0].__dict__


def test_frozen_linear_passes_gradients() -> None:
    linear = nn.Linear(16, 8, bias=False).bfloat16()
    x = torch.randn(3, 16, dtype=torch.bfloat16, requires_grad=True)
    FrozenLinear(linear)(x).sum().backward()
    assert x.grad is not None and x.grad.abs().sum() > 0
