"""What a model costs by its sizes alone: the matrices that a token meets, and its attention.

Reads shapes and configurations, on the meta device as well as on any other. Knows no hardware and no training.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

SCORES = {"cpu": 1 << 24, "cuda": 1 << 26}  # numbers of attention scores that a chunk of queries may have
QUERIES = 256  # of a chunk, where that many fit


@dataclass(frozen=True)
class AttentionSizes:
    """Of all layers together."""

    layers: int = 0
    heads: int = 0
    width: int = 0  # sum over heads of the width of a key and of a value: 2 x it operations per query and key
    kv_values: int = 0  # keys and values that one token leaves in the cache


NO_ATTENTION = AttentionSizes()


def attention_sizes(config: Any) -> AttentionSizes:
    """Of a transformers configuration. Windows are not looked at: under a mask every score is computed."""
    c = config
    layers, heads = c.num_hidden_layers, c.num_attention_heads
    if getattr(c, "kv_lora_rank", None):  # latent attention: transformers caches keys and values as they are used
        key, value, kv = c.qk_nope_head_dim + c.qk_rope_head_dim, c.v_head_dim, heads
    else:
        key = value = getattr(c, "head_dim", None) or c.hidden_size // heads
        kv = getattr(c, "num_key_value_heads", None) or heads
    return AttentionSizes(layers, layers * heads, layers * heads * (key + value), layers * kv * (key + value))


@dataclass(frozen=True)
class Products:
    """The products that a token goes through.

    `weights`: multiplications for one token (experts: those it meets). `values`: read and written around them for one
    token. `dense`, `expert`: parameters there are in all, outside of experts and in them. `share`: of the experts, the
    part that a token meets.
    """

    weights: float = 0
    values: float = 0
    dense: int = 0
    expert: int = 0
    share: float = 1.0
    count: int = 0

    def touched(self, tokens: float) -> float:
        """Parameters that `tokens` tokens read at least once, if they choose their experts independently."""
        return self.dense + self.expert * (1 - (1 - self.share) ** tokens)


def products(parameters: Iterable[tuple[str, Tensor]], config: Any = None) -> Products:
    """Of the matrices among `parameters` (name, tensor); a three-dimensional one holds a matrix per expert, of which
    `config` (the model's, of transformers) says how many a token meets."""
    chosen = next((n for key in _CHOSEN if (n := getattr(config, key, None))), None)
    weights = values = 0.0
    dense = expert = count = 0
    share = 1.0
    for name, p in parameters:
        if p.ndim < 2 or name.endswith("bias"):
            continue
        count += 1
        met = 1
        if p.ndim == 3:
            met = min(chosen or p.shape[0], p.shape[0])
            share, expert = met / p.shape[0], expert + p.numel()
        else:
            dense += p.numel()
        weights += met * p.shape[-1] * p.shape[-2]
        values += met * (p.shape[-1] + p.shape[-2])
    return Products(weights, values, dense, expert, share, count)


_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k")


def decoder_products(model: nn.Module, config: Any) -> Products:
    """Of a causal LM of transformers, its embedding and output head left out."""
    apart = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    head = model.get_output_embeddings()  # type: ignore[operator]
    apart |= {id(p) for p in head.parameters()} if head is not None else set()
    return products(((n, p) for n, p in model.named_parameters() if id(p) not in apart), config)


def chunk_queries(scores: int, device: str) -> int:
    """How many queries may have their scores at once, each `scores` of them, on a device of that kind."""
    return max(16, SCORES.get(device, SCORES["cuda"]) // scores)
