"""Encodings: what comes back is what went in, up to an error that is known beforehand."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from speculators.errors import ConfigError
from train.features.encodings import (
    NAMES,
    bytes_per_token,
    make_encoding,
    normal_levels,
    pack_bits,
    relative_error,
    unpack_bits,
)

# Largest and typical relative squared error of normal numbers. Those of 2 to 5 bits are Max's
# (1960), table I.
MAX_1960 = {2: 0.1175, 3: 0.03454, 4: 0.009497, 5: 0.002499}


def vectors(count: int, width: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


def through(name: str, x: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    encoding = make_encoding(name, x.shape[-1], dtype)
    payload = encoding.encode(x)
    assert payload.dtype == torch.uint8 and payload.shape == (
        *x.shape[:-1],
        encoding.bytes_per_vector,
    )
    decoded = encoding.decode(payload)
    assert decoded.dtype == dtype and decoded.shape == x.shape
    return decoded


@settings(max_examples=40, deadline=None)
@given(bits=st.integers(1, 8), eights=st.integers(1, 5), seed=st.integers(0, 99))
def test_packed_bits_come_back_and_take_no_more_than_they_are(bits, eights, seed):
    codes = torch.randint(
        0, 2**bits, (3, 8 * eights), generator=torch.Generator().manual_seed(seed)
    ).to(torch.uint8)
    packed = pack_bits(codes, bits)
    assert packed.dtype == torch.uint8 and packed.shape == (3, eights * bits)
    assert torch.equal(unpack_bits(packed, bits), codes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_exact_is_exact_and_bf16_is_exact_for_bf16(dtype):
    x = vectors(5, 48).to(dtype)
    assert torch.equal(through("exact", x, dtype), x)
    if dtype == torch.bfloat16:
        assert torch.equal(through("bf16", x, dtype), x)


@pytest.mark.parametrize("bits", MAX_1960)
def test_levels_are_the_best_for_a_normal_distribution(bits):
    x = vectors(400, 256)
    assert relative_error(x, through(f"rotated{bits}", x)).mean().item() == pytest.approx(
        MAX_1960[bits], rel=0.02
    )
    levels, edges = normal_levels(bits)
    assert torch.equal(levels, -levels.flip(0)) and len(edges) == 2**bits - 1


@pytest.mark.parametrize("width", [32, 64, 96, 100, 256, 320, 2880])
@pytest.mark.parametrize("name", NAMES)
def test_any_width_comes_back_within_the_error_of_its_bits(name, width):
    """Widths that no group divides are padded; zeros stay zeros to the bit."""
    x = vectors(40, width)
    x[2] = 0
    found = through(name, x)
    bits = {"exact": 24, "bf16": 8}.get(name) or int(name.removeprefix("rotated"))
    assert relative_error(x, found).mean() < 3 * 4.0**-bits
    assert torch.equal(found[2], torch.zeros(width))


def test_few_large_channels():
    """As language models have them: rotation spreads them over their block."""
    x = vectors(100, 256, seed=3)
    x[:, [7, 200]] *= 40
    others = [i for i in range(256) if i not in (7, 200)]
    found = through("rotated4", x)
    whole, rest = (
        relative_error(a[:, b], found[:, b]).mean() for a, b in ((x, slice(None)), (x, others))
    )
    assert whole < 0.011 and whole < rest


@pytest.mark.parametrize("scale", [1e-30, 1e-4, 1e4, 1e30])
@pytest.mark.parametrize("name", ["rotated3", "rotated6"])
def test_the_error_does_not_depend_on_the_scale(name, scale):
    x = vectors(20, 128)
    one, other = (relative_error(x, through(name, x * s) / s).mean() for s in (1.0, scale))
    assert math.isclose(one, other, rel_tol=0.1)


def test_runs_of_tokens_are_encoded_alone():
    x = vectors(12, 256).unflatten(0, (4, 3))
    for name in NAMES:
        encoding = make_encoding(name, 256, torch.float32)
        assert torch.equal(encoding.encode(x)[1:3], encoding.encode(x[1:3])), name
        torch.testing.assert_close(
            encoding.decode(encoding.encode(x))[2], encoding.decode(encoding.encode(x)[2])
        )


def test_bytes_per_token_count_scales_and_padding():
    assert bytes_per_token(("bf16", "bf16"), 3, 4096, torch.float32) == 4 * 2 * 4096
    assert (
        bytes_per_token(("rotated3", "rotated6"), 3, 256, torch.bfloat16) == 3 * (96 + 2) + 192 + 2
    )
    assert bytes_per_token(("rotated4", "exact"), 0, 100, torch.float32) == 400


def test_a_name_that_is_none():
    with pytest.raises(
        ConfigError, match="unknown encoding 'rotated9'; expected one of exact, bf16"
    ):
        make_encoding("rotated9", 64, torch.float32)
