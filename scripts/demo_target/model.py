"""The network of the quickstart's target: its shape, starting weights that copy, and its growth
during training."""

from __future__ import annotations

import math

import torch

VOCAB = 4096
LAYERS = 16


def build_model(layers: int = LAYERS, vocab: int = VOCAB):
    """A Qwen3 of 16 layers of width 256: deep and narrow, as real targets are relative to their
    heads."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": layers,
        "max_position_embeddings": 2048,
    }
    heads = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "rope_theta": 10000.0,
    }
    tokens = {
        "vocab_size": vocab,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
        "pad_token_id": 3,
    }
    config = Qwen3Config(**sizes, **heads, **tokens, bos_token_id=None, initializer_range=0.02)
    model = Qwen3ForCausalLM(config)
    for name, p in model.named_parameters():  # small initial residual updates, for depth
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            p.data.mul_(1 / math.sqrt(2 * config.num_hidden_layers))
    return model


@torch.no_grad()
def start_with_copying(model) -> None:
    """Sets induction heads as initial weights: they predict the token that followed the last
    occurrence of this one.

    All workloads copy from the request, and small models learn that late, because it takes two
    layers that are useless without each other. The first layer begins with two heads that attend to
    the tokens one and two places back, the second with two that attend to the place where these
    equal the current ones. Training changes all of them. (Circuit: Olsson et al., arXiv
    2209.11895.)"""
    config, last = model.config, model.config.hidden_size - 1
    D, half = config.head_dim, config.head_dim // 2
    embedding = model.model.embed_tokens.weight
    embedding.normal_(std=0.05)
    embedding[:, last] = 0.5  # a constant, for heads that attend by position and not by token

    def directions(count: int) -> torch.Tensor:
        """Random orthonormal rows [count, H] that ignore the constant."""
        rows = torch.linalg.qr(torch.randn(last, count)).Q.T
        return torch.nn.functional.pad(rows, (0, 1))

    reads, writes, copies = directions(D), directions(2 * D), directions(2 * D)
    one_back, two_back = writes[:D], writes[D:]
    first, second = (model.model.layers[i].self_attn for i in (0, 1))
    for attention in (first, second):
        attention.q_norm.weight.fill_(2.0)
        attention.k_norm.weight.fill_(1.5)
    sharp = torch.arange(5)  # fast rotary pairs distinguish neighbouring places
    turn = config.rope_parameters["rope_theta"] ** (-sharp / half)
    first.k_proj.weight[:D] = 0.0
    first.k_proj.weight[sharp, last] = 5.0
    for head, distance, into in ((0, 1, one_back), (1, 2, two_back)):
        rows = slice(head * D, (head + 1) * D)
        first.q_proj.weight[rows] = 0.0
        first.q_proj.weight[head * D + sharp, last] = 5 * torch.cos(distance * turn)
        first.q_proj.weight[head * D + half + sharp, last] = -5 * torch.sin(distance * turn)
        first.o_proj.weight[:, rows] = 0.4 * into.T
    first.v_proj.weight[:D] = 0.2 * reads
    slow = torch.arange(half - 12, half)  # slow rotary pairs hardly turn within a conversation
    places = torch.cat([slow, slow + half])
    for group, (query, key) in enumerate(((reads, one_back), (one_back, two_back))):
        head, kv = 2 * group * D, group * D
        second.q_proj.weight[head : head + D] = second.k_proj.weight[kv : kv + D] = 0.0
        second.q_proj.weight[head + places] = 5 * query[:24]
        second.k_proj.weight[kv + places] = 5 * key[:24]
        copied = copies[kv : kv + D]
        second.v_proj.weight[kv : kv + D] = 0.3 * copied
        second.o_proj.weight[:, head : head + D] = 0.4 * copied.T


def grow(small):
    """A model of LAYERS layers that computes the same as `small`: the inserted layers add nothing
    at first.

    Few layers learn most of the workloads, at a third of the cost of a step.
    """
    model, kept = build_model(), len(small.model.layers)
    state = {name: t for name, t in small.state_dict().items() if ".layers." not in name}
    places = [round((i + 0.5) * LAYERS / kept - 0.5) for i in range(kept)]
    for layer in set(range(LAYERS)) - set(places):
        for part in ("self_attn.o_proj", "mlp.down_proj"):
            model.model.layers[layer].get_submodule(part).weight.data.zero_()
    for place, layer in zip(places, small.model.layers):
        model.model.layers[place].load_state_dict(layer.state_dict())
    model.load_state_dict(state, strict=False)
    return model.to(next(small.parameters()).device).train()
