"""Encodings of hidden states: pure functions from vectors to bytes and back.

A vector is one hidden state of one token, H numbers. Its bytes include its scales, so that any run
of tokens can be read alone.

    exact      the numbers as they are
    bf16       rounded to bfloat16: exact for a bfloat16 target
    rotated    rotated by a random Hadamard matrix, which spreads a few large channels over many and
               makes the numbers nearly normal; then the best levels for a normal distribution (Max,
               "Quantizing for minimum distortion", 1960), one scale per 256 numbers (rotations:
               QuaRot, arXiv 2404.00456). 3 bits for taps, which the head reads, 6 for the last
               hidden state, from which p is computed
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

ROTATED_BITS = (3, 6)  # of taps and of the last hidden state
BLOCK = 256  # numbers that are rotated together and share a scale, at most
SMALLEST_BLOCK = 64  # narrower ones would be mostly scales
TINY = torch.finfo(torch.bfloat16).tiny  # the smallest divisor


@dataclass(frozen=True)
class Plain:
    """A float format without scales, of `width` numbers that were computed in `dtype`."""

    width: int
    dtype: torch.dtype
    stored: torch.dtype

    @property
    def bytes_per_vector(self) -> int:
        """Of one vector as it is written."""
        return self.width * self.stored.itemsize

    def encode(self, vectors: Tensor) -> Tensor:
        """[..., H], finite -> uint8 [..., bytes_per_vector]."""
        return _bytes(vectors.to(self.stored))

    def decode(self, payload: Tensor) -> Tensor:
        """Undoes `encode`, up to the encoding's error -> [..., H] in `dtype`."""
        return _numbers(payload, self.stored).to(self.dtype)


@dataclass(frozen=True)
class Rotated:
    """A random rotation of each block of numbers, then the best levels for a normal distribution:
    a scale in bfloat16 per block, then the codes."""

    width: int
    dtype: torch.dtype
    bits: int

    @property
    def block(self) -> int:
        """Numbers that are rotated together and share a scale."""
        return max(math.gcd(self.width, BLOCK), SMALLEST_BLOCK)

    @property
    def blocks(self) -> int:
        """The last one may be padded."""
        return -(-self.width // self.block)

    @property
    def bytes_per_vector(self) -> int:
        """Scales and padding included."""
        return 2 * self.blocks + self.blocks * self.block * self.bits // 8

    def encode(self, vectors: Tensor) -> Tensor:
        """[..., H], finite -> uint8 [..., bytes_per_vector]."""
        padding = (0, self.blocks * self.block - self.width)
        padded = torch.nn.functional.pad(vectors.float(), padding)
        rotation = _rotation(self.block, padded.device)
        rotated = padded.unflatten(-1, (self.blocks, self.block)) @ rotation
        scales = rotated.square().mean(-1, keepdim=True).sqrt().to(torch.bfloat16)
        edges = normal_levels(self.bits)[1].to(rotated.device)
        # the scale of zeros is 0, and zeros come back
        codes = torch.bucketize(rotated / scales.float().clamp(min=TINY), edges).to(torch.uint8)
        packed = pack_bits(codes, self.bits).flatten(-2)
        return torch.cat([_bytes(scales.squeeze(-1)), packed], dim=-1)

    def decode(self, payload: Tensor) -> Tensor:
        """Undoes `encode`, up to the encoding's error -> [..., H] in `dtype`."""
        scales = _numbers(payload[..., : 2 * self.blocks], torch.bfloat16).float().unsqueeze(-1)
        shape = (self.blocks, self.block * self.bits // 8)
        codes = payload[..., 2 * self.blocks :].unflatten(-1, shape)
        levels = normal_levels(self.bits)[0].to(codes.device)
        rotated = levels[unpack_bits(codes, self.bits).int()] * scales
        vectors = (rotated @ _rotation(self.block, codes.device).T).flatten(-2)
        return vectors[..., : self.width].to(self.dtype)


Encoding = Plain | Rotated


def make_encodings(name: str, width: int, dtype: torch.dtype) -> tuple[Encoding, Encoding]:
    """The encodings of taps and of the last hidden state."""
    if name == "rotated":
        taps, last_hidden = (Rotated(width, dtype, bits) for bits in ROTATED_BITS)
        return taps, last_hidden
    plain = Plain(width, dtype, dtype if name == "exact" else torch.bfloat16)
    return plain, plain


def bytes_per_token(name: str, taps: int, width: int, dtype: torch.dtype) -> int:
    """Bytes of `taps` taps and the last hidden state."""
    tap, last_hidden = (part.bytes_per_vector for part in make_encodings(name, width, dtype))
    return taps * tap + last_hidden


def relative_error(vectors: Tensor, decoded: Tensor) -> Tensor:
    """|x - x̂|² / |x|² of each vector, [..., H] -> [...]; 0 for zeros that came back."""
    x = vectors.float()
    y = decoded.float()
    return (x - y).square().sum(-1) / x.square().sum(-1).clamp(min=TINY)


# --------------------------------------------------------------------------------------------- bits


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """uint8 codes below 2**bits [..., N], N a multiple of 8 -> uint8 [..., N · bits / 8]."""
    words = codes.unflatten(-1, (-1, 8)).long() << (bits * torch.arange(8, device=codes.device))
    return _bytes(words.sum(-1, keepdim=True))[..., :bits].flatten(-2)


def unpack_bits(payload: Tensor, bits: int) -> Tensor:
    """Undoes `pack_bits` -> uint8 [..., N]."""
    padded = torch.nn.functional.pad(payload.unflatten(-1, (-1, bits)), (0, 8 - bits))
    words = _numbers(padded, torch.int64)
    codes = (words >> (bits * torch.arange(8, device=payload.device))) & (2**bits - 1)
    return codes.flatten(-2).to(torch.uint8)


def _bytes(numbers: Tensor) -> Tensor:
    return numbers.contiguous().view(torch.uint8)


def _numbers(payload: Tensor, dtype: torch.dtype) -> Tensor:
    return payload.contiguous().view(dtype)


# ---------------------------------------------------------------------------------------------
# levels and rotations


@cache
def normal_levels(bits: int) -> tuple[Tensor, Tensor]:
    """The 2**bits levels with the least mean squared error for a standard normal number, and the
    edges between them.

    Max's conditions, iterated: an edge lies half-way between two levels, a level is the mean of
    what lies between its edges."""
    count = 2**bits
    spread = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    # the best there is for many levels; a good start for few
    levels = math.sqrt(3) * torch.special.ndtri(spread)
    bound = torch.tensor([math.inf], dtype=torch.float64)
    for _ in range(400):
        edges = torch.cat([-bound, (levels[1:] + levels[:-1]) / 2, bound])
        density = torch.exp(-edges.square() / 2) / math.sqrt(2 * math.pi)
        levels = (density[:-1] - density[1:]) / torch.special.ndtr(edges).diff()
        levels = (levels - levels.flip(0)) / 2  # symmetric to the bit
    return levels.float(), ((levels[1:] + levels[:-1]) / 2).float()


@cache
def _rotation(size: int, device: torch.device) -> Tensor:
    """A Hadamard matrix with random signs, always the same, orthonormal, [size, size]."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    digest = torch.tensor(list(hashlib.shake_256(b"rotation").digest(size)))
    signs = (digest & 1).float() * 2 - 1
    return (signs[:, None] * matrix / math.sqrt(size)).to(device)
