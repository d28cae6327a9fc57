"""What an unroll keeps in memory for its backward pass, by formula: nothing is computed.

Sizes are those of PyTorch's operations on a GPU. A product keeps its input in the dtype that it
multiplies in, an RMS norm its input, a product of two tensors both. Under autocast a norm is
float32: it keeps a float32 copy of its input, and each product that reads it casts its output anew.
Where the layers are compiled (`kernels.LEAST_NUMBERS`), casts and activations are computed again in
place of being kept. Gathered masks, cosines and log-sum-exps are left out, which is a hundredth.

H is the width of the states, Q and G that of all queries and of all keys, I that of the MLP, X that
of what the projections read; b the bytes of a number in products, s those of one in the stream."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from draftsmith.speculators import kernels
from draftsmith.speculators.config import DecoderConfig

EXACT = 4  # bytes of a number in float32


@dataclass(frozen=True)
class Batch:
    """The rows of an unroll: `rows` of `length` tokens, over `depths`. `dtype`: of products,
    float32 or that of autocast; `recomputes`: with activation checkpointing."""

    rows: int
    length: int
    depths: int
    dtype: torch.dtype
    device: torch.device
    recomputes: bool = False

    @property
    def tokens(self) -> int:
        """Of all rows."""
        return self.rows * self.length

    @property
    def size(self) -> int:
        """Bytes of a number in products."""
        return self.dtype.itemsize

    def compiles(self, numbers: int) -> bool:
        """Whether a layer that reads a tensor of so many numbers is compiled."""
        return self.device.type == "cuda" and numbers >= kernels.LEAST_NUMBERS


@dataclass(frozen=True)
class Widths:
    """Those of a layer of transformers; of routed experts, the ones that a token meets."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    qk_norm: bool

    @classmethod
    def of(cls, config: Any) -> Widths:
        """By the usual names of a text model's config.json."""
        heads = config.num_attention_heads
        experts = getattr(config, "num_experts_per_tok", None)
        inner = getattr(config, "moe_intermediate_size", None)
        whole = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
        return cls(
            hidden_size=config.hidden_size,
            intermediate_size=experts * inner if experts and inner else whole,
            num_attention_heads=heads,
            num_key_value_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            qk_norm=config.model_type.startswith("qwen3"),
        )


def layer_bytes(
    shape: DecoderConfig | Widths,
    slots: int,
    batch: Batch,
    *,
    stream: int,
    inputs: int | None = None,
    norms: int = 1,
    compiles: bool = True,
) -> int:
    """Of a decoder layer over so many slots, without keys outside of them.

    `stream`: bytes of a number of the states that it adds to; `inputs`: X, where it is not H;
    `norms`: of its inputs [slots, H] in front of the projections; `compiles`: it is a DecoderLayer.

    Compiled, it keeps what its products, its norms and its attention read, and no copy:

        norms·s·H + b·X          its inputs, and what q, k and v read
        b·(2Q + 2G) + b·Q        queries, keys, values, output; that once more as o reads it
        b·(Q + G)                with norms of queries and keys, these before them
        b·H + b·H                what o adds, which gives the stream again; what gate and up read
        3·b·I                    gate, up, and what down reads

    One operation at a time and under autocast (b < 4), a norm keeps float32, and q, k, v, gate and
    up copies each; in float32 there is one. The activation of the gate is kept beside it: 4·b·I."""
    b = batch.size
    H = shape.hidden_size
    Q = shape.num_attention_heads * shape.head_dim
    G = shape.num_key_value_heads * shape.head_dim
    X = inputs or H
    attended = b * (3 * Q + 2 * G)
    before_norms = Q + G if shape.qk_norm else 0
    if compiles and batch.compiles(slots * H):
        read = norms * stream * H + b * X
        mlp = b * H + b * H + 3 * b * shape.intermediate_size
        return slots * (read + attended + b * before_norms + mlp)
    copies = 1 if b == EXACT else 2
    of_norms = norms * EXACT * H + EXACT * before_norms + EXACT * H
    read = b * X * (copies + 1 if copies > 1 and norms else 1)
    mlp = copies * b * H + 4 * b * shape.intermediate_size
    return slots * (of_norms + read + attended + mlp)


def block_bytes(
    shape: DecoderConfig | Widths, slots: int, batch: Batch, pairs: int, width: int = 1
) -> int:
    """Of the part of attention that reads keys outside of the row (flex_attention.py), in blocks of
    `width` queries: queries laid out by block and their output, `pairs` joined keys and values of
    each slot, and for each score itself and its weight in float32 and in products."""
    b = batch.size
    Q = shape.num_attention_heads * shape.head_dim
    G = shape.num_key_value_heads * shape.head_dim
    scores = shape.num_attention_heads * pairs * width * (2 * EXACT + b)
    return slots * (b * (2 * Q + 2 * G * pairs) + scores)
