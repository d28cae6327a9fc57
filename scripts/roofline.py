"""What a training step and a decoding round have to compute and to move, from shapes alone, and how
long that takes a device at the rates that were measured on it.

FLOPs are those of products of matrices, 2 for each multiplication: a frozen matrix is multiplied
once, a trained one three times (forward, gradient of the input, gradient of the weight). Attention
counts the pairs of a query and a key that it sees, so that work on masked pairs lowers the share
that is reached. Recomputed activations count once. Bytes are the least that has to be moved: every
weight once for each time that it is multiplied as a whole, hidden states in and out of each layer,
and what an optimizer reads and writes. No logits: a fused kernel would not write them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

FORWARD_AND_BACKWARD = 3
ADAMW = 7 * 4  # bytes of a parameter in float32: weight, gradient and two states in, three out


@dataclass(frozen=True)
class Rates:
    """Measured rates of a device: FLOP/s of products, and bytes per second read plus written."""

    flops: float
    bandwidth: float


@dataclass(frozen=True)
class Work:
    """FLOPs and bytes of one phase."""

    flops: float = 0.0
    bytes: float = 0.0

    def seconds(self, rates: Rates) -> float:
        """The bound of a device: arithmetic or memory, whichever takes longer."""
        return max(self.flops / rates.flops, self.bytes / rates.bandwidth)


@dataclass(frozen=True)
class StepShape:
    """A training step: `rows` rows of `length` tokens, all supervised; `depths` of an unroll;
    `anchors` of a row and `block` tokens of each, of a family that drafts blocks."""

    rows: int
    length: int
    depths: int
    anchors: int = 0
    block: int = 0

    @property
    def tokens(self) -> int:
        """Of all rows."""
        return self.rows * self.length

    @property
    def block_tokens(self) -> int:
        """Of all blocks of all rows, the known first token of a block included."""
        return self.rows * self.anchors * self.block


def causal_pairs(rows: int, length: int) -> float:
    """Pairs of a query and a key that causal attention sees."""
    return rows * length * (length + 1) / 2


def attention_flops(pairs: float, width: int) -> float:
    """Of one layer's forward: scores and weighted values. `width`: of all query heads together."""
    return 4 * pairs * width


def target_work(config: Any, rows: int, length: int, itemsize: int) -> Work:
    """The features of a target of Llama's kind: its layers, without embedding and output head."""
    width = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    hidden = config.hidden_size
    matrices = hidden * (2 * width + 2 * keys + 3 * config.intermediate_size)
    layers = config.num_hidden_layers
    tokens = rows * length
    attention = attention_flops(causal_pairs(rows, length), width)
    moved = itemsize * (matrices + 2 * tokens * hidden)
    return Work(layers * (2 * tokens * matrices + attention), layers * moved)


def linears(module: nn.Module) -> dict[str, nn.Linear]:
    """The matrices of a head that are multiplied in an unroll, by name: not its output head."""
    return {
        name: part
        for name, part in module.named_modules()
        if isinstance(part, nn.Linear) and "lm_head" not in name
    }


def multiplied(family: str, name: str, s: StepShape) -> int:
    """Rows that a matrix of a head, called `name` in it, is multiplied with in an unroll."""
    if family == "draft_model" or name == "fc":
        return s.tokens
    if s.block:
        context = s.tokens if name.endswith(("k_proj", "v_proj")) else 0
        return s.block_tokens + context
    return s.tokens * s.depths


def seen_pairs(family: str, s: StepShape) -> float:
    """Pairs of a query and a key that one layer of a head sees in an unroll: of depth k the text up
    to a slot and the slot's own keys of the k depths before; of a block half a row, on average, and
    the block."""
    if s.block:
        return s.block_tokens * (s.length / 2 + s.block)
    if family == "draft_model":
        return causal_pairs(s.rows, s.length)
    return s.depths * causal_pairs(s.rows, s.length) + s.tokens * s.depths * (s.depths - 1) / 2


def head_work(family: str, module: nn.Module, s: StepShape, itemsize: int) -> Work:
    """Forward and backward of a head's unroll, without its output head. `itemsize`: bytes of a
    number of the dtype that it computes in; weights and gradients are in float32."""
    matrices = linears(module)
    flops = sum(2 * multiplied(family, name, s) * m.weight.numel() for name, m in matrices.items())
    layers = [m for name, m in matrices.items() if name.endswith("o_proj")]
    pairs = seen_pairs(family, s)
    flops += sum(attention_flops(pairs, layer.in_features) for layer in layers)
    times = 1 if family == "draft_model" or s.block else s.depths
    weights = sum(m.weight.numel() for m in matrices.values())
    slots = s.block_tokens or s.tokens * times
    states = sum(2 * slots * layer.out_features for layer in layers)
    moved = FORWARD_AND_BACKWARD * itemsize * (times * weights + states) + 4 * weights
    return Work(FORWARD_AND_BACKWARD * flops, moved)


def objective_terms(family: str, s: StepShape) -> int:
    """Rows that the output head reads in an unroll."""
    if s.block:
        return s.rows * s.anchors * (s.block - 1)
    return s.tokens if family == "draft_model" else s.tokens * s.depths


def objective_work(
    terms: int, targets: int, width: int, drafts: int, hidden: int, vocab: int, *, trained: bool
) -> Work:
    """Draft logits [terms, drafts] with their gradients, and the target's logits [targets, vocab],
    which are not trained. `trained`: the weight of the draft head is, too."""
    draft_flops = 2 * terms * width * drafts * (FORWARD_AND_BACKWARD if trained else 2)
    target_flops = 2 * targets * hidden * vocab
    heads = 2 * (2 * width * drafts + hidden * vocab)
    states = 2 * (2 * terms * width + targets * hidden)
    return Work(draft_flops + target_flops, heads + states)


def optimizer_work(trainable: int) -> Work:
    """AdamW in float32."""
    return Work(0.0, ADAMW * trainable)


def round_bytes(
    target: nn.Module, context: int, itemsize: int, drafter: nn.Module | None = None, depth: int = 0
) -> float:
    """Bytes that a decoding round of one row has to read: the weights of the target but its
    embedding, keys and values of `context` tokens, and the drafter's weights at each of `depth`
    drafts."""
    config = target.config
    table = target.get_input_embeddings().weight  # type: ignore[operator]
    weights = sum(p.numel() for p in target.parameters() if p is not table)
    if target.get_output_embeddings().weight is table:  # type: ignore[operator]
        weights += table.numel()
    per_token = 2 * config.num_key_value_heads * config.head_dim * config.num_hidden_layers
    drafts = 0 if drafter is None else depth * sum(p.numel() for p in drafter.parameters())
    return itemsize * (weights + drafts + context * per_token)
