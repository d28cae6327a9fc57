"""Frozen linear layers: the same numbers as the layers they stand for, until these may change
again."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from draftsmith.speculators.layers.frozen_linear import FrozenLinear, freeze_linears, thaw_linears

SHAPES = [(1, 16), (3, 16), (4, 16), (0, 16), (1, 1, 16), (2, 3, 16), (1, 0, 16)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_it_answers_as_the_layer_does(
    dtype: torch.dtype, shape: tuple[int, ...], bias: bool
) -> None:
    linear = nn.Linear(16, 24, bias=bias).to(dtype)
    x = torch.randn(shape, dtype=dtype)
    frozen = FrozenLinear(linear)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            expected, found = linear(x), frozen(x)
        assert found.shape == expected.shape
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_several_layers_of_one_input_are_one_product(dtype: torch.dtype) -> None:
    linears = [nn.Linear(16, width, bias=False).to(dtype) for width in (8, 24, 4)]
    x = torch.randn(2, 5, 16, dtype=dtype)
    with torch.inference_mode():
        torch.testing.assert_close(
            FrozenLinear(*linears)(x), torch.cat([linear(x) for linear in linears], dim=-1)
        )


def test_a_slice_of_a_larger_buffer_is_read_right() -> None:
    linear, buffer = nn.Linear(16, 8, bias=False).bfloat16(), torch.randn(4, 6, 16).bfloat16()
    with torch.inference_mode():
        torch.testing.assert_close(
            FrozenLinear(linear)(buffer[:2, 1:4]), linear(buffer[:2, 1:4].clone())
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_thawing_gives_the_layers_back(dtype: torch.dtype) -> None:
    module = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4)).to(dtype)
    x = torch.randn(1, 16).to(dtype)
    freeze_linears(module)
    with torch.inference_mode():
        before = module(x)
    with torch.no_grad():
        module[0].weight.mul_(2)
    with torch.inference_mode():
        copied = module[0].forward.packed is not None
        assert torch.equal(module(x), before) == copied
    thaw_linears(module)
    with torch.inference_mode():
        assert not torch.equal(module(x), before)
    assert "forward" not in module[0].__dict__


def test_what_has_gradients_still_has_them() -> None:
    linear = nn.Linear(16, 8, bias=False).bfloat16()
    x = torch.randn(3, 16, dtype=torch.bfloat16, requires_grad=True)
    FrozenLinear(linear)(x).sum().backward()
    assert x.grad is not None and x.grad.abs().sum() > 0


def test_a_shared_product_follows_its_weights_when_told() -> None:
    linear, x = nn.Linear(16, 24).bfloat16(), torch.randn(3, 16).bfloat16()
    frozen = FrozenLinear(linear, shared=True, packs=True)
    with torch.inference_mode():
        linear.weight.mul_(2)
        frozen.read_weights()
        torch.testing.assert_close(frozen(x), linear(x))
