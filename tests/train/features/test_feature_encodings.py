"""Encodings: what comes back is what went in, up to an error that is known beforehand."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.train.features.encodings import (
    ROTATED_BITS,
    Encoding,
    Rotated,
    bytes_per_token,
    make_encodings,
    normal_levels,
    pack_bits,
    relative_error,
    unpack_bits,
)

MAX_1960 = {2: 0.1175, 3: 0.03454, 4: 0.009497, 5: 0.002499}  # his table I: error by bits


def vectors(count: int, width: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


def rotated(bits: int, width: int) -> Rotated:
    return Rotated(width, torch.float32, bits)


def through(encoding: Encoding, x: torch.Tensor) -> torch.Tensor:
    payload = encoding.encode(x)
    assert payload.dtype == torch.uint8
    assert payload.shape == (*x.shape[:-1], encoding.bytes_per_vector)
    decoded = encoding.decode(payload)
    assert decoded.dtype == x.dtype and decoded.shape == x.shape
    return decoded


@settings(max_examples=30, deadline=None)
@given(bits=st.integers(1, 7), eights=st.integers(1, 5), seed=st.integers(0, 99))
def test_packed_bits_come_back_and_take_no_more_than_they_are(bits, eights, seed):
    source = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 2**bits, (3, 8 * eights), generator=source).to(torch.uint8)
    packed = pack_bits(codes, bits)
    assert packed.dtype == torch.uint8 and packed.shape == (3, eights * bits)
    assert torch.equal(unpack_bits(packed, bits), codes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_exact_is_exact_and_bf16_is_exact_for_bf16(dtype):
    x = vectors(5, 48).to(dtype)
    exact, bf16 = (through(make_encodings(name, 48, dtype)[0], x) for name in ("exact", "bf16"))
    assert torch.equal(exact, x)
    assert torch.equal(bf16, x) if dtype == torch.bfloat16 else relative_error(x, bf16).max() < 1e-4


@pytest.mark.parametrize("bits", MAX_1960)
def test_levels_are_the_best_for_a_normal_distribution(bits):
    x = vectors(400, 256)
    error = relative_error(x, through(rotated(bits, 256), x)).mean().item()
    assert error == pytest.approx(MAX_1960[bits], rel=0.02)
    levels, edges = normal_levels(bits)
    assert torch.equal(levels, -levels.flip(0)) and len(edges) == 2**bits - 1


@pytest.mark.parametrize("width", [32, 100, 256, 320, 2880])
@pytest.mark.parametrize("bits", ROTATED_BITS)
def test_any_width_comes_back_within_the_error_of_the_bits(bits, width):
    """Widths that no block divides are padded; zeros stay zeros to the bit; runs of tokens are
    encoded alone."""
    x = vectors(40, width)
    x[2] = 0
    encoding = rotated(bits, width)
    decoded = through(encoding, x)
    error = relative_error(x, decoded).mean()
    assert error < 3 * 4.0**-bits
    assert torch.equal(decoded[2], torch.zeros(width))
    assert torch.equal(encoding.encode(x)[5:9], encoding.encode(x[5:9]))


def test_few_large_channels():
    """As language models have them: rotation spreads them over their block."""
    x = vectors(100, 256, seed=3)
    x[:, [7, 200]] *= 40
    others = [i for i in range(256) if i not in (7, 200)]
    decoded = through(rotated(4, 256), x)
    whole, rest = (
        relative_error(a[:, b], decoded[:, b]).mean() for a, b in ((x, slice(None)), (x, others))
    )
    assert whole < 0.011 and whole < rest


def test_bytes_per_token_count_scales_and_padding():
    assert bytes_per_token("bf16", 3, 4096, torch.float32) == 4 * 2 * 4096
    assert bytes_per_token("rotated", 3, 256, torch.bfloat16) == 3 * (96 + 2) + 192 + 2
    assert bytes_per_token("exact", 0, 100, torch.float32) == 400
