"""Encodings of hidden states in few bits: pure functions from vectors to bytes and back.

A vector is one hidden state of one token, H numbers. Its bytes include its scales, so that any run
of tokens can be read alone.

    exact       the numbers as they are
    bf16        rounded to bfloat16: exact for a bfloat16 target
    fp8         e4m3, one scale per vector
    int4        -7 .. 7, one scale per 64 numbers
    rotated2 .. rotated8
                rotated by a random Hadamard matrix, which spreads a few large channels over many
                and makes the numbers nearly normal; then the best levels for a normal distribution
                (Max, "Quantizing for minimum distortion", 1960), one scale per 256 numbers
                (rotations: QuaRot, arXiv 2404.00456)
"""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from functools import cache

import torch
from torch import Tensor

from speculators.errors import ConfigError

GROUP = 64  # numbers that share a scale in int4
BLOCK = 256  # numbers that are rotated together and share a scale, at most
FP8_MAX = 448.0  # of e4m3
TINY = torch.finfo(torch.bfloat16).tiny  # the smallest divisor


class Encoding(ABC):
    """An encoding of vectors of `width` numbers that were computed in `dtype`."""

    def __init__(self, name: str, width: int, dtype: torch.dtype) -> None:
        self.name, self.width, self.dtype = name, width, dtype

    @property
    @abstractmethod
    def bytes_per_vector(self) -> int:
        """Scales and padding included."""

    @abstractmethod
    def encode(self, vectors: Tensor) -> Tensor:
        """[..., H], finite -> uint8 [..., bytes_per_vector]."""

    @abstractmethod
    def decode(self, payload: Tensor) -> Tensor:
        """Undoes `encode`, up to the encoding's error -> [..., H] in `dtype`."""


class Plain(Encoding):
    """A float format without scales."""

    def __init__(self, name: str, width: int, dtype: torch.dtype, stored: torch.dtype) -> None:
        super().__init__(name, width, dtype)
        self.stored = stored

    @property
    def bytes_per_vector(self) -> int:
        return self.width * self.stored.itemsize

    def encode(self, vectors: Tensor) -> Tensor:
        return _bytes(vectors.to(self.stored))

    def decode(self, payload: Tensor) -> Tensor:
        return _numbers(payload, self.stored).to(self.dtype)


class Scaled(Encoding):
    """Groups of numbers, each with a scale in bfloat16 and codes; the scales come first."""

    group: int  # numbers with one scale
    bits: int  # of one code

    @property
    def groups(self) -> int:
        return -(-self.width // self.group)

    @property
    def bytes_per_vector(self) -> int:
        return 2 * self.groups + self.groups * self.group * self.bits // 8

    def encode(self, vectors: Tensor) -> Tensor:
        padding = self.groups * self.group - self.width
        grouped = torch.nn.functional.pad(vectors.float(), (0, padding)).unflatten(
            -1, (self.groups, self.group)
        )
        scales, codes = self._codes(grouped)
        return torch.cat([_bytes(scales.squeeze(-1)), codes.flatten(-2)], dim=-1)

    def decode(self, payload: Tensor) -> Tensor:
        scales = _numbers(payload[..., : 2 * self.groups], torch.bfloat16).float().unsqueeze(-1)
        codes = payload[..., 2 * self.groups :].unflatten(
            -1, (self.groups, self.group * self.bits // 8)
        )
        return self._values(scales, codes).flatten(-2)[..., : self.width].to(self.dtype)

    @abstractmethod
    def _codes(self, grouped: Tensor) -> tuple[Tensor, Tensor]:
        """[..., groups, group] -> scales bfloat16 [..., groups, 1], codes uint8 [..., groups,
        bytes]."""

    @abstractmethod
    def _values(self, scales: Tensor, codes: Tensor) -> Tensor:
        """float32 scales [..., groups, 1], uint8 codes [..., groups, bytes] -> [..., groups,
        group]."""


class Fp8(Scaled):
    """e4m3 with one scale per vector, whose range its exponents cover."""

    bits = 8

    def __init__(self, name: str, width: int, dtype: torch.dtype) -> None:
        super().__init__(name, width, dtype)
        self.group = width

    def _codes(self, grouped: Tensor) -> tuple[Tensor, Tensor]:
        scales = (grouped.abs().amax(-1, keepdim=True) / FP8_MAX).to(torch.bfloat16)
        fitted = _divided(grouped, scales).clamp(-FP8_MAX, FP8_MAX)  # the scale was rounded
        return scales, fitted.to(torch.float8_e4m3fn).view(torch.uint8)

    def _values(self, scales: Tensor, codes: Tensor) -> Tensor:
        return codes.contiguous().view(torch.float8_e4m3fn).float() * scales


class Int4(Scaled):
    """Symmetric, in groups; the error is at most half a step, a fourteenth of the largest number of
    the group."""

    bits, group, largest = 4, GROUP, 7

    def _codes(self, grouped: Tensor) -> tuple[Tensor, Tensor]:
        scales = (grouped.abs().amax(-1, keepdim=True) / self.largest).to(torch.bfloat16)
        steps = _divided(grouped, scales).round().clamp(-self.largest, self.largest)
        return scales, pack_bits((steps + self.largest).to(torch.uint8), self.bits)

    def _values(self, scales: Tensor, codes: Tensor) -> Tensor:
        return (unpack_bits(codes, self.bits).float() - self.largest) * scales


class Rotated(Scaled):
    """A random rotation, then the best levels for a normal distribution."""

    def __init__(self, name: str, width: int, dtype: torch.dtype, bits: int) -> None:
        super().__init__(name, width, dtype)
        self.bits = bits
        self.group = max(
            math.gcd(width, BLOCK), GROUP
        )  # narrower blocks would be mostly scales: padded instead

    def _codes(self, grouped: Tensor) -> tuple[Tensor, Tensor]:
        rotated = grouped @ _rotation(self.group, grouped.device)
        largest = (
            rotated.abs().amax(-1, keepdim=True).clamp(min=TINY)
        )  # squares of the numbers themselves may overflow
        scales = (largest * (rotated / largest).square().mean(-1, keepdim=True).sqrt()).to(
            torch.bfloat16
        )
        edges = normal_levels(self.bits)[1].to(grouped.device)
        return scales, pack_bits(
            torch.bucketize(_divided(rotated, scales), edges).to(torch.uint8), self.bits
        )

    def _values(self, scales: Tensor, codes: Tensor) -> Tensor:
        levels = normal_levels(self.bits)[0].to(codes.device)
        rotated = levels[unpack_bits(codes, self.bits).int()] * scales
        return rotated @ _rotation(self.group, codes.device).T


NAMES = ("exact", "bf16", "fp8", "int4", *(f"rotated{bits}" for bits in range(2, 9)))


def make_encoding(name: str, width: int, dtype: torch.dtype) -> Encoding:
    """The encoding `name` for hidden states of `width` numbers in the target's `dtype`."""
    if name.startswith("rotated") and name in NAMES:
        return Rotated(name, width, dtype, int(name.removeprefix("rotated")))
    match name:
        case "exact":
            return Plain(name, width, dtype, dtype)
        case "bf16":
            return Plain(name, width, dtype, torch.bfloat16)
        case "fp8":
            return Fp8(name, width, dtype)
        case "int4":
            return Int4(name, width, dtype)
    raise ConfigError(
        f"features.encoding: unknown encoding {name!r}; expected one of {', '.join(NAMES)}"
    )


def bytes_per_token(names: tuple[str, str], taps: int, width: int, dtype: torch.dtype) -> int:
    """Bytes of `taps` taps and the last hidden state, whose encodings are `names`."""
    tap, last_hidden = (make_encoding(name, width, dtype).bytes_per_vector for name in names)
    return taps * tap + last_hidden


def relative_error(vectors: Tensor, decoded: Tensor) -> Tensor:
    """|x - x̂|² / |x|² of each vector, [..., H] -> [...]; of a zero vector 0 if it came back as
    zeros."""
    largest = vectors.float().abs().amax(-1, keepdim=True).clamp(min=TINY)
    x, y = vectors.float() / largest, decoded.float() / largest
    return (x - y).square().sum(-1) / x.square().sum(-1).clamp(min=TINY)


# --------------------------------------------------------------------------------------------- bits


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """uint8 codes below 2**bits [..., N], N a multiple of 8 -> uint8 [..., N · bits / 8]: 8 codes
    in `bits` bytes."""
    if bits == 8:
        return codes
    words = codes.unflatten(-1, (-1, 8)).long() << (bits * torch.arange(8, device=codes.device))
    return _bytes(words.sum(-1, keepdim=True))[..., :bits].flatten(-2)


def unpack_bits(payload: Tensor, bits: int) -> Tensor:
    """Undoes `pack_bits` -> uint8 [..., N]."""
    if bits == 8:
        return payload
    words = (
        torch.nn.functional.pad(payload.unflatten(-1, (-1, bits)), (0, 8 - bits))
        .contiguous()
        .view(torch.int64)
    )
    codes = (words >> (bits * torch.arange(8, device=payload.device))) & (2**bits - 1)
    return codes.flatten(-2).to(torch.uint8)


def _bytes(numbers: Tensor) -> Tensor:
    return numbers.contiguous().view(torch.uint8)


def _numbers(payload: Tensor, dtype: torch.dtype) -> Tensor:
    return payload.contiguous().view(dtype)


def _divided(numbers: Tensor, scales: Tensor) -> Tensor:
    """Divides by the stored scales, in bfloat16; the scale of zeros is 0, and zeros come back."""
    return numbers / scales.float().clamp(min=TINY)


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
    levels = math.sqrt(3) * torch.special.ndtri(
        spread
    )  # the best there is for many levels; a good start for few
    bound = torch.tensor([math.inf], dtype=torch.float64)
    for _ in range(400):
        edges = torch.cat([-bound, (levels[1:] + levels[:-1]) / 2, bound])
        density = torch.exp(-edges.square() / 2) / math.sqrt(2 * math.pi)
        levels = (density[:-1] - density[1:]) / torch.special.ndtr(edges).diff()
        levels = (levels - levels.flip(0)) / 2  # symmetric to the bit
    return levels.float(), ((levels[1:] + levels[:-1]) / 2).float()


@cache
def _rotation(size: int, device: torch.device) -> Tensor:
    """A Hadamard matrix with random signs, orthonormal, [size, size]; the same wherever it is
    made."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    digest = torch.frombuffer(
        bytearray(hashlib.shake_256(b"rotation").digest(size)), dtype=torch.uint8
    )
    signs = (digest & 1).float() * 2 - 1
    return (signs[:, None] * matrix / math.sqrt(size)).to(device)
