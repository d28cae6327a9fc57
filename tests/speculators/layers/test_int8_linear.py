"""Int8 linear layers: the numbers they promise, for any rows."""

from __future__ import annotations

import torch
from torch import nn

from draftsmith.speculators.layers.int8_linear import (
    FrozenInt8Linear,
    Int8Linear,
    dtype_of,
    quantise_linears,
)


def test_int8_linear_multiplies_what_both_rows_are_rounded_to():
    torch.manual_seed(0)
    linear = nn.Linear(24, 10)
    layer = Int8Linear.of(linear)
    assert layer.weight.dtype == torch.int8 and layer.weight.abs().max() == 127
    weight = layer.weight.double() * layer.weight_scale.double()
    assert (weight - linear.weight).abs().max() <= layer.weight_scale.max() / 2
    x = torch.randn(3, 5, 24)
    x[0, 0] = 0
    scale = x.abs().amax(-1, keepdim=True).clamp_min(1e-12) / 127
    rounded = (x / scale).round().double() * scale.double()
    expected = rounded @ weight.T + linear.bias.double()
    torch.testing.assert_close(layer(x).double(), expected, atol=1e-5, rtol=1e-5)
    for row in range(3):  # no row depends on another
        assert torch.equal(layer(x)[row], layer(x[row]))
    assert layer(x[:0]).shape == (0, 5, 10)


def test_int8_linears_joined_are_the_same_without_a_second_copy():
    torch.manual_seed(0)
    layers = [Int8Linear.of(nn.Linear(16, n, bias=False)) for n in (8, 3)]
    x = torch.randn(2, 16)
    apart = torch.cat([layer(x) for layer in layers], dim=-1)
    joined = FrozenInt8Linear(*layers)
    assert torch.equal(joined(x), apart)
    assert torch.equal(torch.cat([layer(x) for layer in layers], dim=-1), apart)
    assert layers[0].weight.data_ptr() == joined.weight.data_ptr()


def test_quantise_linears_keeps_scales_in_a_cast_and_projections_onto_one_number():
    module = nn.Sequential(nn.Linear(8, 4, bias=False), nn.Linear(4, 1))
    quantise_linears(module)
    module.bfloat16()
    layer = module[0]
    assert isinstance(layer, Int8Linear) and type(module[1]) is nn.Linear
    assert layer.weight.dtype == torch.int8 and layer.weight_scale.dtype == torch.float32
    assert dtype_of(layer) == torch.bfloat16
    assert layer(torch.ones(2, 8, dtype=torch.bfloat16)).dtype == torch.bfloat16
