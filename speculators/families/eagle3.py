"""EAGLE-3 (arXiv 2503.01840) and the switches of EAGLE-3.1.

Slot t pairs the embedding of x_{t+1} with g_t, a projection of the target's taps at t, runs them through one decoder
layer and predicts x_{t+2}. Further tokens come from the head's own state in place of g: depth k of slot t reads
x_{t+1+k} and the depth k-1 output, at rotary position t + k, and predicts x_{t+2+k}. `unroll` does that for all slots
at once (training-time test), `draft` for the newest slot of each row with a cache; both run the same layer.
Tensor names are those of vLLM's EAGLE-3 loader, so an export is this module's state under its own names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, rotate_half

from speculators.attention import unrolled_attention
from speculators.config import DrafterConfig
from speculators.drafter import Drafter, DraftStep, valid_terms
from speculators.errors import ConfigError
from speculators.families.eagle3_start import (
    SHARPNESS,
    start_from_least_squares,
    start_from_taps,
    terms_wanted,
)
from speculators.frozen_linear import FrozenLinear
from speculators.target import FrozenTarget, TargetFeatures


class RMSNorm(nn.RMSNorm):
    """Root-mean-square norm in one call; a drafter's step is short enough for the number of calls to matter."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__(width, eps=eps)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class Eagle3Attention(nn.Module):
    """Grouped-query attention; the first layer's projections read [norm(embedding); norm(state)], 2H wide."""

    def __init__(self, config: DrafterConfig, inputs: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        self.scale = config.head_dim**-0.5
        self.q_proj = nn.Linear(inputs, self.heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(inputs, self.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(inputs, self.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.head_dim, config.hidden_size, bias=False)
        if config.qk_norm:
            self.q_norm = RMSNorm(self.head_dim, eps=config.rms_norm_eps)
            self.k_norm = RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.qk_norm = config.qk_norm
        self.fused: FrozenLinear | None = None  # all three, while frozen for drafting

    def project(
        self, x: Tensor, rotary: tuple[Tensor, Tensor], asking: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, T, inputs] -> query [B, h, T, d], key and value [B, g, T, d], rotated.

        `asking` [B, M]: the slots that have a query, which is then [B, h, M, d].
        """
        B, T, _ = x.shape
        if asking is not None:
            return self._project_some(x, rotary, asking)
        if self.fused is None:
            parts = [self.q_proj(x), self.k_proj(x), self.v_proj(x)]
        else:
            D = self.head_dim
            parts = self.fused(x).split([self.heads * D, self.kv_heads * D, self.kv_heads * D], -1)
        q, k, v = (part.view(B, T, -1, self.head_dim) for part in parts)
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        qk = _rotated(torch.cat([q, k], dim=2).transpose(1, 2), rotary)  # [B, h + g, T, d]: one rotation for both
        q, k = qk.split([self.heads, self.kv_heads], dim=1)
        v = v.transpose(1, 2)
        return q.to(v.dtype), k.to(v.dtype), v

    def _project_some(self, x: Tensor, rotary: tuple[Tensor, Tensor], asking: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        B, T, _ = x.shape
        q = self.q_proj(_at(x, asking)).view(B, asking.shape[1], self.heads, self.head_dim)
        k, v = (part(x).view(B, T, -1, self.head_dim) for part in (self.k_proj, self.v_proj))
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        cos, sin = rotary
        q = _rotated(q.transpose(1, 2), (_at(cos.expand(B, -1, -1), asking), _at(sin.expand(B, -1, -1), asking)))
        k, v = _rotated(k.transpose(1, 2), rotary), v.transpose(1, 2)
        return q.to(v.dtype), k.to(v.dtype), v


class GatedMLP(nn.Module):
    """down(act(gate(x)) · up(x)), gate and up as one product while frozen."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        if config.hidden_act not in ACT2FN:
            raise ConfigError(f"drafter: hidden_act {config.hidden_act!r} is not one of transformers' activations")
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.act = ACT2FN[config.hidden_act]
        self.fused: FrozenLinear | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.fused is None:
            gate, up = self.gate_proj(x), self.up_proj(x)
        else:
            gate, up = self.fused(x).chunk(2, dim=-1)
        return self.down_proj(self.act(gate) * up)


class Eagle3Layer(nn.Module):
    """One decoder layer. `attend(layer, q, k, v)` is the caller's: training and decoding differ only in it."""

    def __init__(self, config: DrafterConfig, first: bool) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.first, self.norm_before_residual = first, config.norm_before_residual
        self.input_layernorm = RMSNorm(width, eps=eps)
        if first:
            self.hidden_norm = RMSNorm(width, eps=eps)
        self.self_attn = Eagle3Attention(config, 2 * width if first else width)
        self.post_attention_layernorm = RMSNorm(width, eps=eps)
        self.mlp = GatedMLP(config)

    def forward(
        self,
        embeds: Tensor,
        state: Tensor,
        rotary: tuple[Tensor, Tensor],
        attend: Callable,
        asking: Tensor | None = None,
    ) -> Tensor:
        """embeds, state [B, T, H] -> the layer's output before any final norm [B, T, H].

        `asking` [B, M]: the slots whose output is wanted, [B, M, H]; the others give keys and values only.
        """
        if self.first:
            normed = self.hidden_norm(state)
            residual = normed if self.norm_before_residual else state
            x = torch.cat([self.input_layernorm(embeds), normed], dim=-1)
        else:
            residual, x = state, self.input_layernorm(state)
        attended = attend(*self.self_attn.project(x, rotary, asking), self.self_attn.scale)  # [B, h, T or M, d]
        if asking is not None:
            residual = _at(residual, asking)
            if not asking.shape[1]:
                return residual
        x = residual + self.self_attn.o_proj(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.post_attention_layernorm(x))


class Eagle3(Drafter):
    """The EAGLE-3 head: three (or n) taps, a shared or own embedding, one or more layers, an own output head."""

    reads_taps = True

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__(config)
        width, taps = config.hidden_size, len(config.tap_layers)
        self.fc = nn.Linear(taps * config.target_hidden_size, width, bias=False)
        eps = config.rms_norm_eps
        if config.norm_before_fc:
            self.input_norm = RMSNorm(taps * config.target_hidden_size, eps=eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(config.target_hidden_size, eps=eps) for _ in range(taps))
        self.layers = nn.ModuleList(Eagle3Layer(config, first=i == 0) for i in range(config.num_layers))
        self.norm = RMSNorm(width, eps=eps)
        self.lm_head = nn.Linear(width, config.draft_vocab_size, bias=False)
        if config.own_embeddings:
            self.embed_tokens = nn.Embedding(config.vocab_size, width)
        if config.reduced_vocabulary:
            self.register_buffer("target_ids", torch.arange(config.draft_vocab_size))
        self.rotary_emb = LlamaRotaryEmbedding(config=_llama_config(config))
        self._rotary_table: tuple[Tensor, Tensor] | None = None  # [positions, d], made when drafting begins

    @property
    def start_terms(self) -> int:
        return terms_wanted(self)

    @property
    def draft_to_target(self) -> Tensor | None:
        return self.target_ids if self.config.reduced_vocabulary else None

    @torch.no_grad()
    def initialise_from(
        self, target: FrozenTarget, *, lm_head: bool = True, features: Sequence[TargetFeatures] | None = None
    ) -> Eagle3:
        """See `Drafter.initialise_from`. Rows of `lm_head` (and the embedding, if owned) are the target's own where
        the widths agree; `features` fit the rest in closed form (families/eagle3_start.py)."""
        if self.config.own_embeddings and self.config.hidden_size == self.config.target_hidden_size:
            self.embed_tokens.weight.copy_(target.embed_tokens.weight)
        if features is None:
            start_from_taps(self, target)
        else:
            start_from_least_squares(self, target, features)
        if lm_head and self.config.target_hidden_size == self.config.hidden_size:
            rows, ids = target.lm_head.weight.float(), self.draft_to_target
            self.lm_head.weight.copy_(rows if ids is None else rows[ids.to(rows.device)])
            if (norm := target.final_norm_weight) is not None:
                self.norm.weight.copy_(norm)
            if features is not None:
                self.norm.weight.mul_(SHARPNESS)
        return self

    @torch.no_grad()
    def freeze(self) -> Eagle3:
        """See `Drafter.freeze`: projections of one input become one product, a step being mostly calls."""
        super().freeze()
        for layer in self.layers:
            a, m = layer.self_attn, layer.mlp
            a.fused = FrozenLinear(a.q_proj, a.k_proj, a.v_proj)
            m.fused = FrozenLinear(m.gate_proj, m.up_proj)
        return self

    def thaw(self) -> None:
        super().thaw()
        for layer in self.layers:
            layer.self_attn.fused = layer.mlp.fused = None

    # -------------------------------------------------------------- shared by training and drafting

    def embed(self, token_ids: Tensor) -> Tensor:
        """[B, T] -> [B, T, H] from the own table, or the target's."""
        table = self.embed_tokens if self.config.own_embeddings else self.target.embed_tokens
        return table(token_ids)

    def project_taps(self, taps: Tensor) -> Tensor:
        """taps [B, T, n·H] -> g [B, T, H]."""
        return self.fc(self.read_taps(taps.to(self.fc.weight.dtype)))

    def read_taps(self, taps: Tensor) -> Tensor:
        """taps [..., n·H] -> what `fc` reads of them [..., n·H]."""
        if self.config.norm_before_fc:
            taps = self.input_norm(taps)
        if self.config.fc_norm:
            parts = taps.chunk(len(self.fc_norm), dim=-1)
            taps = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts)], dim=-1)
        return taps

    def _run(
        self,
        embeds: Tensor,
        state: Tensor,
        rotary: tuple[Tensor, Tensor],
        attends: Sequence[Callable],
        asking: Tensor | None = None,
    ) -> Tensor:
        """All layers -> the state that is fed back and, after `norm` unless it is already normed, read by the head."""
        embeds = embeds.to(state.dtype)
        for i, (layer, attend) in enumerate(zip(self.layers, attends)):
            state = layer(embeds, state, rotary, attend, asking if i == len(self.layers) - 1 else None)
        return self.norm(state) if self.config.norm_output else state

    def head(self, hidden: Tensor) -> Tensor:
        """[N, H] states as `_run` returns them -> [N, V_draft]."""
        return self.lm_head(hidden if self.config.norm_output else self.norm(hidden))

    def head_parameters(self) -> list[nn.Parameter]:
        modules = [self.lm_head] if self.config.norm_output else [self.lm_head, self.norm]
        return [p for module in modules for p in module.parameters() if p.requires_grad]

    # -------------------------------------------------------------- training

    def unroll(self, features: TargetFeatures, steps: int = 7) -> Iterator[DraftStep]:
        """Training-time test: `steps` depths; a slot's terms are those `valid_terms` allows.

        Every slot gives keys and values at depth 0, since later slots attend to it. All the rest, from the last layer's
        queries on, runs over slots that have a term at some depth, which in chat data is the smaller part of a row.
        """
        ids, segments, positions = features.input_ids, features.segment_ids, features.position_ids
        B, T = ids.shape
        valid = [valid_terms(features, depth + 2) for depth in range(steps)]  # each [B, T]
        slots = torch.arange(T, device=ids.device).expand(B, T)
        chosen = _slots_in_use(torch.stack(valid).any(0))  # [B, M]
        state = self.project_taps(features.taps)
        causal: list[tuple[Tensor, Tensor]] = []  # per layer: keys and values of depth 0
        own: list[list[tuple[Tensor, Tensor]]] = [[] for _ in self.layers]  # per layer: those of each later depth
        for depth in range(steps):
            tokens = ids.gather(1, (slots + 1 + depth) % T)  # x_{t+1+depth}; what wraps is never valid
            asking = chosen if depth == 0 else None
            attends = [
                self._unrolled(i, depth, causal, own[i], slots if i < len(self.layers) - 1 else chosen, segments)
                for i in range(len(self.layers))
            ]
            rotary = self.rotary_emb(state, positions.gather(1, slots) + depth)
            state, slots = self._run(self.embed(tokens), state, rotary, attends, asking), chosen
            terms = valid[depth].gather(1, slots)
            anchors = (slots + T * torch.arange(B, device=ids.device)[:, None])[terms]
            yield DraftStep(
                depth=depth,
                hidden=state[terms],
                target_index=anchors + depth + 1,
                anchor_index=anchors,
                weight=torch.ones(len(anchors), device=state.device),
            )

    def count_terms(self, batch, steps: int) -> Tensor:
        """See `Drafter.count_terms`."""
        return torch.stack([valid_terms(batch, depth + 2).sum() for depth in range(steps)])

    def _unrolled(
        self, layer: int, depth: int, causal: list, own: list, slots: Tensor, segment_ids: Tensor
    ) -> Callable:
        def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
            if depth == 0:
                causal.append((k, v))
            else:
                own.append((k, v))
            return unrolled_attention(q, *causal[layer], own, slots, segment_ids, scale)

        return attend

    # -------------------------------------------------------------- inference

    def draft(
        self,
        cache,
        start: int,
        stop: int,
        token_ids: Tensor,
        taps: Tensor | None,
        last_hidden: Tensor | None,
        counts: Sequence[int],
        k: int,
        sample: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """See `Drafter.draft`."""
        nobody = token_ids[:, :0]  # nothing is drafted: keys and values are all that is wanted
        states = self._extend(cache, start, stop, token_ids, self.project_taps(taps), None if k else nobody)
        for row, count in enumerate(counts, start):
            cache.advance(row, count)
        if k == 0:
            return nobody
        if token_ids.shape[1] == 1:
            state = states
        else:
            last = torch.tensor(counts, device=states.device) - 1
            state = states[torch.arange(len(counts), device=states.device), last][:, None]  # [b, 1, H]
        drafted = [sample(self.head(state[:, 0]))]
        for _ in range(k - 1):
            token = drafted[-1][:, None]
            state = self._extend(cache, start, stop, token, state)
            for row in range(start, stop):
                cache.advance(row, 1)
            drafted.append(sample(self.head(state[:, 0])))
        for row in range(start, stop):
            cache.truncate(row, cache.lengths[row] - (k - 1))
        return torch.stack(drafted, dim=1)

    def _extend(
        self, cache, start: int, stop: int, token_ids: Tensor, state: Tensor, asking: Tensor | None = None
    ) -> Tensor:
        """One pass over M new slots per row, written at each row's own length: states [b, M, H], or of `asking`."""
        M = token_ids.shape[1]
        position_ids = cache.position_ids(start, stop, M)
        mask, causal = cache.mask(start, stop, M), M > 1
        view = cache.view(start, stop, M)

        def attend(layer: int) -> Callable:
            def inner(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
                k, v = view.update(k, v, layer)
                if not q.shape[2]:
                    return q
                return nn.functional.scaled_dot_product_attention(
                    q,
                    k,
                    v,
                    attn_mask=mask,
                    is_causal=mask is None and causal,
                    scale=scale,
                    enable_gqa=q.shape[1] != k.shape[1],
                )

            return inner

        rotary = self._rotary_at(position_ids, cache.capacity, state)
        attends = [attend(i) for i in range(len(self.layers))]
        return self._run(self.embed(token_ids), state, rotary, attends, asking)

    def _rotary_at(self, position_ids: Tensor, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [b, M, d] of positions below `length`, looked up where they depend on nothing else."""
        if self.rotary_emb.rope_type in ("dynamic", "longrope"):  # these change with the length of the text
            return self.rotary_emb(like, position_ids)
        table = self._rotary_table
        if (
            table is None
            or table[0].shape[0] < length
            or table[0].dtype != like.dtype
            or table[0].device != like.device
        ):
            cos, sin = self.rotary_emb(like, torch.arange(length, device=like.device)[None])
            table = self._rotary_table = (cos[0], sin[0])
        return table[0][position_ids], table[1][position_ids]


def _at(x: Tensor, slots: Tensor) -> Tensor:
    """x [B, T, D] at slots [B, M] -> [B, M, D]."""
    return x.gather(1, slots[..., None].expand(-1, -1, x.shape[-1]))


def _rotated(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """x [B, heads, T, d] by the angles of its positions, cos and sin [B, T, d]."""
    cos, sin = rotary
    return x * cos[:, None] + rotate_half(x) * sin[:, None]


def _slots_in_use(wanted: Tensor) -> Tensor:
    """wanted bool [B, T] -> [B, M] slots of each row, wanted ones first and ascending; M is the most a row wants.

    A row that wants fewer is filled up with slots that are not wanted: they have no term, and nobody reads them.
    """
    M = max(int(wanted.sum(1).max()), 1)
    return torch.argsort(~wanted, dim=1, stable=True)[:, :M]


def _llama_config(config: DrafterConfig) -> LlamaConfig:
    """What transformers' Llama modules read of a head's configuration."""
    return LlamaConfig(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        hidden_act=config.hidden_act,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.rms_norm_eps,
        mlp_bias=False,
        vocab_size=config.vocab_size,
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters=dict(config.rope_parameters),
    )
