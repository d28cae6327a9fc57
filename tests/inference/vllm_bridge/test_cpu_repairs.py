"""What stands in for kernels of vLLM's CPU build."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from draftsmith.inference.vllm_bridge import vllm_engine

REPAIRS = Path(vllm_engine.__file__).parent / "connectors" / "cpu_repairs.py"


@pytest.fixture
def repairs() -> SimpleNamespace:
    """The module, which vLLM's processes import from its folder."""
    return SimpleNamespace(**runpy.run_path(str(REPAIRS)))


def int8(*shape: int) -> torch.Tensor:
    return torch.randint(-127, 128, shape, dtype=torch.int8)


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_int8_products_are_those_of_the_numbers(repairs, shifted: bool, biased: bool) -> None:
    """s_x (x − z) · s_w W + b, as what is rounded to int8 is defined."""
    torch.manual_seed(0)
    x, weight = int8(3, 24), int8(24, 16)
    scales, input_scale = torch.rand(16, 1), torch.rand(3, 1)
    zero = torch.randint(-9, 9, (3, 1), dtype=torch.int32) if shifted else None
    bias = torch.randn(16) if biased else None
    of_one = weight.sum(0, keepdim=True) * scales.flatten()
    handler = repairs.Int8Weight(weight, scales, torch.float32, True, shifted, 32)
    out = repairs.multiply_int8(handler, x, torch.empty(3, 16), input_scale, zero, of_one, bias)
    whole = x.double() - (zero if shifted else 0)
    expected = input_scale * (whole @ weight.double()) * scales.flatten()
    expected += bias if biased else 0
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    assert handler.n == 16


@pytest.mark.parametrize(("most", "exact"), [(2**31, True), (2**15 - 1, False)])
def test_a_kernel_whose_sums_are_cut_is_found(repairs, most: int, exact: bool) -> None:
    """`most`: that a sum of two products can be."""

    def multiply(handler, x, output, *_):
        pairs = (x.long() + 128).unflatten(-1, (-1, 2))[..., None] * handler.weight.long()
        sums = pairs.sum(-2).clamp(max=most).sum(-2) - 128 * handler.weight.long().sum((0, 1))
        output.copy_(sums)

    def create(weight, *_):
        return SimpleNamespace(weight=weight.unflatten(0, (-1, 2)))

    ops = SimpleNamespace(create_onednn_scaled_mm=create, onednn_scaled_mm=multiply)
    assert repairs.multiplies_int8(ops) is exact
