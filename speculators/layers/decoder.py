"""Decoder layers of draft heads, as Llama has them: attention that leaves the attending to its
caller.

Training and decoding differ only in what a query may see, so a layer projects, hands query, key and
value to `attend`, and goes on with what comes back. While a head is frozen for drafting,
projections of one input are one product."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from typing_extensions import override

from draftsmith.speculators import kernels
from draftsmith.speculators.config import DecoderConfig
from draftsmith.speculators.errors import ConfigError
from draftsmith.speculators.layers.frozen_linear import FrozenLinear
from draftsmith.speculators.layers.int8_linear import FrozenInt8Linear, Int8Linear, dtype_of
from draftsmith.speculators.layers.rms_norm import rms_norm

Rotary = tuple[Tensor, Tensor]  # cosines and sines [B or 1, T, d]
# query, key, value, scale -> [B, h, T, d]
Attend = Callable[[Tensor, Tensor, Tensor, float], Tensor]
Attends = Sequence[Attend]  # of each layer
Asked = Tensor | None  # [B, M] the slots whose output is asked for; None: all
Fused = FrozenLinear | FrozenInt8Linear


class RMSNorm(nn.RMSNorm):
    """Root-mean-square norm whose weight takes the precision of its input."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__(width, eps=eps)

    @override
    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> the same, in the precision of x."""
        return rms_norm(x, self.weight.to(x.dtype), self.eps)


class Attention(nn.Module):
    """Grouped-query attention over inputs of any width."""

    def __init__(self, config: DecoderConfig, inputs: int) -> None:
        super().__init__()
        self.heads = config.num_attention_heads
        self.kv_heads = config.num_key_value_heads
        self.head_dim = config.head_dim
        bias = config.attention_bias
        self.scale = config.head_dim**-0.5
        self.q_proj = nn.Linear(inputs, self.heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(inputs, self.kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(inputs, self.kv_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(self.heads * self.head_dim, config.hidden_size, bias=False)
        if config.qk_norm:
            self.q_norm = RMSNorm(self.head_dim, eps=config.rms_norm_eps)
            self.k_norm = RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.qk_norm = config.qk_norm
        self.fused: Fused | None = None  # all three, while frozen for drafting
        self.qk_weight: Tensor | None = None  # of both norms [h + g, 1, d], while frozen

    def project(
        self, x: Tensor, rotary: Rotary, queries: Asked = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, T, inputs] -> query [B, h, T, d], key and value [B, g, T, d], rotated.

        `queries` [B, M]: the slots that have a query, which is then [B, h, M, d].
        """
        if self.fused is None or queries is not None:
            return self._project_apart(x, rotary, queries)
        # of queries, keys and values [B, h + 2g, T, d]
        heads = self.fused(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        # what Tensor.split does behind a layer of Python, which takes longer than the split
        qk, v = torch.split_with_sizes(heads, [self.heads + self.kv_heads, self.kv_heads], dim=1)
        if self.qk_weight is not None:
            qk = rms_norm(qk, self.qk_weight, self.q_norm.eps)
        qk = _rotated(qk, rotary)  # [B, h + g, T, d]: one rotation for both
        q, k = torch.split_with_sizes(qk.to(v.dtype), [self.heads, self.kv_heads], dim=1)
        return q, k, v

    def _project_apart(
        self, x: Tensor, rotary: Rotary, queries: Asked
    ) -> tuple[Tensor, Tensor, Tensor]:
        asking = x
        turned = rotary
        if queries is not None:
            cos, sin = (at_slots(part.expand(len(x), -1, -1), queries) for part in rotary)
            asking = at_slots(x, queries)
            turned = (cos, sin)
        q = self.q_proj(asking).unflatten(-1, (-1, self.head_dim))
        k = self.k_proj(x).unflatten(-1, (-1, self.head_dim))
        v = self.v_proj(x).unflatten(-1, (-1, self.head_dim))
        if self.qk_norm:
            q = self.q_norm(q)
            k = self.k_norm(k)
        q = _rotated(q.transpose(1, 2), turned)
        k = _rotated(k.transpose(1, 2), rotary)
        return q.to(v.dtype), k.to(v.dtype), v.transpose(1, 2)

    @torch.no_grad()
    def join_norms(self) -> None:
        """Of a fused projection: one weight for the norms of queries and keys."""
        if self.qk_norm:
            q = self.q_norm.weight.expand(self.heads, -1)
            k = self.k_norm.weight.expand(self.kv_heads, -1)
            self.qk_weight = torch.cat([q, k])[:, None].to(dtype_of(self.q_proj))

    def project_context(self, x: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """x [B, T, inputs] -> rotated keys and values [B, g, T, d] of slots that ask nothing."""
        k, v = (part(x).unflatten(-1, (-1, self.head_dim)) for part in (self.k_proj, self.v_proj))
        k = self.k_norm(k) if self.qk_norm else k
        return _rotated(k.transpose(1, 2), rotary).to(v.dtype), v.transpose(1, 2)


class GatedMLP(nn.Module):
    """down(act(gate(x)) · up(x)), gate and up as one product while frozen."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        if config.hidden_act not in ACT2FN:
            raise ConfigError(
                f"hidden_act {config.hidden_act!r} is not transformers'", where="drafter"
            )
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.act = ACT2FN[config.hidden_act]
        self.fused: Fused | None = None

    @override
    def forward(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., H]."""
        return self.down_proj(self.inner(x))

    def inner(self, x: Tensor) -> Tensor:
        """What the down projection reads of x [..., H]: [..., intermediate_size]."""
        if self.fused is None:
            gate = self.gate_proj(x)
            up = self.up_proj(x)
        else:
            gate, up = self.fused(x).chunk(2, dim=-1)
        return self.act(gate) * up


class DecoderLayer(nn.Module):
    """One pre-norm decoder layer. `attend(q, k, v, scale)` is the caller's.

    `inputs`: width of what the projections read, where it is not the state's. `input_norm=False`:
    they read the state as it is."""

    def __init__(
        self, config: DecoderConfig, *, inputs: int | None = None, input_norm: bool = True
    ) -> None:
        super().__init__()
        width = config.hidden_size
        eps = config.rms_norm_eps
        self.input_layernorm = RMSNorm(width, eps=eps) if input_norm else None
        self.self_attn = Attention(config, inputs or width)
        self.post_attention_layernorm = RMSNorm(width, eps=eps)
        self.mlp = GatedMLP(config)

    def forward(
        self, state: Tensor, rotary: Rotary, attend: Attend, queries: Asked = None
    ) -> Tensor:
        """state [B, T, H] -> the layer's output before any final norm [B, T, H].

        `queries` [B, M]: the slots whose output is needed, [B, M, H]; the others give keys and
        values only."""
        return self.run(attend, queries, rotary, state)

    def read(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """state [B, T, H] -> what the projections read [B, T, inputs], and what the layer adds to
        [B, T, H]. A layer of several inputs has its own."""
        return (state if self.input_layernorm is None else self.input_layernorm(state)), state

    def run(self, attend: Attend, queries: Asked, rotary: Rotary, *inputs: Tensor) -> Tensor:
        """The layer, `inputs` being those of `read`. While it trains, what lies on either side of
        `attend` is compiled where the device compiles: `attend` keeps keys, and has kernels of its
        own."""
        before: Callable[..., tuple[Tensor, ...]] = DecoderLayer.before
        after: Callable[..., Tensor] = DecoderLayer.after
        if torch.is_grad_enabled():
            before = kernels.on_device("layers", before, inputs[0])
            after = kernels.on_device("layers", after, inputs[0])
        residual, *projected = before(self, queries, rotary, *inputs)
        attended = attend(*projected, self.self_attn.scale)  # [B, h, T or M, d]
        if queries is not None and not queries.shape[1]:
            return residual
        return after(self, attended, residual)

    def before(self, queries: Asked, rotary: Rotary, *inputs: Tensor) -> tuple[Tensor, ...]:
        """The residual [B, T, H] or of the queries, and query, key and value."""
        x, residual = self.read(*inputs)
        projected = self.self_attn.project(x, rotary, queries)
        if queries is not None:
            residual = at_slots(residual, queries)
        return residual, *projected

    def after(self, attended: Tensor, residual: Tensor) -> Tensor:
        """What was attended to [B, h, T or M, d] -> the layer's output [B, T or M, H]."""
        x = residual + self.self_attn.o_proj(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.post_attention_layernorm(x))

    def fuse(self, *, shared: bool = False, packs: bool = False) -> None:
        """Projections of one input become one product, a step of decoding being mostly calls.
        `shared`, `packs`: as of `FrozenLinear`."""
        a = self.self_attn
        m = self.mlp
        a.fused = _fused(a.q_proj, a.k_proj, a.v_proj, shared=shared, packs=packs)
        a.join_norms()
        if isinstance(m, GatedMLP):
            m.fused = _fused(m.gate_proj, m.up_proj, shared=shared, packs=packs)

    def unfuse(self) -> None:
        """Undoes `fuse`: the projections are read one by one again, as training needs them."""
        self.self_attn.fused = self.self_attn.qk_weight = self.mlp.fused = None


class ExactBuffers(nn.Module):
    """A module whose buffers (frequencies, biases of a router) keep their precision."""

    def _apply(self, fn: Callable, *args, **kwargs) -> nn.Module:
        exact = dict(self.named_buffers(remove_duplicate=False))
        super()._apply(fn, *args, **kwargs)
        for name, now in dict(self.named_buffers(remove_duplicate=False)).items():
            parent, _, buffer = name.rpartition(".")
            self.get_submodule(parent)._buffers[buffer] = exact[name].to(now.device)
        return self


class RotaryTable(ExactBuffers):
    """Cosines and sines of positions; `rotary_emb`: how an architecture makes them, or Llama's."""

    def __init__(self, config: DecoderConfig, rotary_emb: nn.Module | None = None) -> None:
        super().__init__()
        self.rotary_emb = rotary_emb or _llama_rotary(config)
        self._table: Tensor | None = None  # [positions, 2 d], made when drafting begins

    def forward(self, like: Tensor, position_ids: Tensor) -> Rotary:
        """position_ids [B, T] -> [B, T, d] in the dtype of `like`."""
        return self.rotary_emb(like, position_ids)

    def forget(self) -> None:
        """To be called when the frequencies were changed."""
        self._table = None

    def lookup(self, position_ids: Tensor, length: int, like: Tensor) -> Rotary:
        """The same for positions below `length`, looked up where they depend on nothing else."""
        if self.rotary_emb.rope_type in ("dynamic", "longrope"):  # they change with the length
            return self.rotary_emb(like, position_ids)
        table = self._table
        kind = (like.dtype, like.device)
        if table is None or len(table) < length or (table.dtype, table.device) != kind:
            every = torch.arange(length, device=like.device)[None]
            self._table = table = torch.cat(self.rotary_emb(like, every), -1)[0]
        cos, sin = torch.embedding(table, position_ids).chunk(2, -1)
        return cos, sin


def _fused(*linears: Any, shared: bool, packs: bool) -> Fused:
    if isinstance(linears[0], Int8Linear):
        return FrozenInt8Linear(*linears)
    return FrozenLinear(*linears, shared=shared, packs=packs)


def at_slots(x: Tensor, slots: Tensor) -> Tensor:
    """x [B, T, D] at slots [B, M] -> [B, M, D]."""
    return x.gather(1, slots[..., None].expand(-1, -1, x.shape[-1]))


def _rotated(x: Tensor, rotary: Rotary) -> Tensor:
    """x [B, heads, T, d] by the angles of its positions, cos and sin [B, T, d]."""
    cos = rotary[0].unsqueeze(1)
    sin = rotary[1].unsqueeze(1)
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return torch.addcmul(x * cos, turned, sin)


def _llama_rotary(config: DecoderConfig) -> LlamaRotaryEmbedding:
    """ConfigError for a rotation that transformers does not know, or that lacks a field."""
    try:
        return LlamaRotaryEmbedding(config=_llama_config(config))
    except (KeyError, TypeError) as error:
        raise ConfigError(
            f"transformers has no rotation of the parameters {dict(config.rope_parameters)}:"
            f" {error}; write those that the drafter was trained with",
            where="rope_parameters",
        ) from error


def _llama_config(config: DecoderConfig) -> LlamaConfig:
    """A head's configuration as transformers' Llama modules read it."""
    fields = config.llama_fields() | {"rope_parameters": dict(config.rope_parameters)}
    del fields["rope_theta"]
    return LlamaConfig(**fields, mlp_bias=False, vocab_size=config.vocab_size)
