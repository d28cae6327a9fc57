"""Draft heads of Draftsmith in plain transformers: this file lies beside their weights.

    head = AutoModel.from_pretrained(FOLDER, trust_remote_code=True)
    model.generate(**inputs, assistant_model=head, speculation_type="dflash")

In each round transformers' DFlash generator hands over the states of the tokens that were just
verified, and the embeddings of the newest token and of mask tokens behind it; the model's own head
makes drafts of what comes back. An MTP module needs more of its target: `head.attach(model, 3)`
first, for three drafts. Written by `draftsmith export --format transformers`; needs torch
and transformers alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3MLP,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    rotate_half,
)


class DraftsmithConfig(PretrainedConfig):
    """The fields of config.json."""

    model_type = "draftsmith_dflash"


class DraftsmithMtpConfig(DraftsmithConfig):
    """transformers keeps one model per class of configurations."""

    model_type = "draftsmith_mtp"


class Attention(nn.Module):
    """Slots attend to the context and to themselves, under a mask."""

    def __init__(self, config: Any, index: int) -> None:
        super().__init__()
        width = config.hidden_size
        self.head_dim = config.head_dim
        self.index = index
        queries = config.num_attention_heads * self.head_dim
        keys = config.num_key_value_heads * self.head_dim
        bias = config.attention_bias
        self.q_proj = nn.Linear(width, queries, bias=bias)
        self.k_proj = nn.Linear(width, keys, bias=bias)
        self.v_proj = nn.Linear(width, keys, bias=bias)
        self.o_proj = nn.Linear(queries, width, bias=False)
        self.q_norm: nn.Module = nn.Identity()
        self.k_norm: nn.Module = nn.Identity()
        if config.qk_norm:
            self.q_norm = Qwen3RMSNorm(self.head_dim, eps=config.rms_norm_eps)
            self.k_norm = Qwen3RMSNorm(self.head_dim, eps=config.rms_norm_eps)

    def forward(
        self, x: Tensor, context: Tensor, rotary: tuple[Tensor, Tensor], seen: Tensor, cache: Any
    ) -> Tensor:
        """x [1, Q, H] asks; context [1, n, H] and x give keys and values. rotary: of all n + Q
        positions; seen bool [Q, S]: the keys of the cache and these that each query reads."""
        keyed = torch.cat([context, x], dim=1)
        query = self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.head_dim))).transpose(1, 2)
        key = self.k_norm(self.k_proj(keyed).unflatten(-1, (-1, self.head_dim))).transpose(1, 2)
        value = self.v_proj(keyed).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        cos, sin = (part[:, None] for part in rotary)
        key = key * cos + rotate_half(key) * sin
        cos, sin = (part[:, :, -x.shape[1] :] for part in (cos, sin))
        query = query * cos + rotate_half(query) * sin
        key, value = cache.update(key, value, self.index)
        attended = nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=seen, enable_gqa=True
        )
        return self.o_proj(attended.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """A decoder layer around `Attention`."""

    def __init__(self, config: Any, index: int) -> None:
        super().__init__()
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = Attention(config, index)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = Qwen3MLP(config)

    def forward(self, state: Tensor, context: Tensor, *attended: Any) -> Tensor:
        """state [B, Q, H] of the slots and context [B, T, H] -> [B, Q, H]."""
        state = state + self.self_attn(self.input_layernorm(state), context, *attended)
        return state + self.mlp(self.post_attention_layernorm(state))


class DraftsmithHead(PreTrainedModel):
    """What the exported heads have in common: their config, and which keys a query sees."""

    config_class = DraftsmithConfig
    _supports_sdpa = True

    def keys_seen(self, queries: int, first: int, keys: int, mask: Tensor | None) -> Tensor:
        """bool [queries, keys] of queries from position `first` on: all that are no padding."""
        seen = torch.ones(queries, keys, dtype=torch.bool, device=self.device)
        if self.config.is_causal:
            seen = seen.tril(first)
        if (window := self.config.attention_window) is not None:
            seen = seen & ~torch.ones_like(seen).tril(first - window)
        return seen if mask is None else seen & mask[0, :keys].bool()


class DraftsmithDFlash(DraftsmithHead):
    """A DFlash block: slots read a context of the target's states, and each other."""

    def __init__(self, config: DraftsmithConfig) -> None:
        super().__init__(config)
        width = config.hidden_size
        eps = config.rms_norm_eps
        self.fc = nn.Linear(len(config.target_layer_ids) * width, width, bias=False)
        self.hidden_norm = Qwen3RMSNorm(width, eps=eps)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.num_hidden_layers))
        self.norm = Qwen3RMSNorm(width, eps=eps)
        self.rotary_emb = Qwen3RotaryEmbedding(config)
        self.post_init()

    @torch.no_grad()
    def forward(
        self,
        noise_embeds: Tensor,
        context_hidden_states: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        cache: Any = None,
        **kwargs: Any,
    ) -> BaseModelOutput:
        """noise_embeds [1, Q, H], context_hidden_states [1, n, taps·H] -> states [1, Q, H]."""
        cache = past_key_values if cache is None else cache  # its name until 5.23
        state = noise_embeds.to(self.dtype)
        context = self.hidden_norm(self.fc(context_hidden_states.to(self.dtype)))
        first = cache.get_seq_length() + context.shape[1]
        Q = state.shape[1]
        seen = self.keys_seen(Q, first, first + Q, attention_mask)
        rotary = self.rotary_emb(state, position_ids)
        for layer in self.layers:
            state = layer(state, context, rotary, seen, cache)
        return BaseModelOutput(last_hidden_state=self.norm(state))


class DraftsmithMtp(DraftsmithHead):
    """A module that pairs the target's state at t with the token at t + 1."""

    config_class = DraftsmithMtpConfig

    def __init__(self, config: DraftsmithMtpConfig) -> None:
        super().__init__(config)
        width = config.hidden_size
        eps = config.rms_norm_eps
        self.input_proj = nn.Linear(2 * width, width, bias=False)
        self.layer = Layer(config, 0)
        self.embed_norm, self.hidden_norm, self.final_norm = (
            Qwen3RMSNorm(width, eps=eps) for _ in range(3)
        )
        self.rotary_emb = Qwen3RotaryEmbedding(config)
        self._target: list[Any] = []  # in a list, so that it is no submodule
        self._read: Tensor | None = None  # the tokens of the target's last forward
        self.post_init()

    def attach(self, target: Any, num_drafts: int = 1) -> DraftsmithMtp:
        """Drafts `num_drafts` tokens in a round for `target`, whose embedding and head it uses."""

        def remember(model: Any, args: tuple, kwargs: dict) -> None:
            self._read = kwargs.get("input_ids", args[0] if args else None)

        target.register_forward_pre_hook(remember, with_kwargs=True)
        self._target = [target]
        self.config.block_size = num_drafts + 1
        return self

    @torch.no_grad()
    def forward(
        self,
        noise_embeds: Tensor,
        context_hidden_states: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        cache: Any = None,
        **kwargs: Any,
    ) -> BaseModelOutput:
        """noise_embeds [1, K + 1, H], of which the first is the newest token's;
        context_hidden_states [1, n, H] -> states [1, K + 1, H], whose first is not read."""
        if not self._target:
            raise ValueError("this head uses its target's embedding: call head.attach(model) first")
        embed = self._target[0].get_input_embeddings()
        output = self._target[0].get_output_embeddings()
        cache = past_key_values if cache is None else cache  # its name until 5.23
        n = context_hidden_states.shape[1]
        newest = noise_embeds[:, :1]
        embeds = torch.cat([embed(self._read[:, 1:n]), newest], dim=1)
        state = context_hidden_states.to(self.dtype)
        positions = position_ids[:, :n]
        states = [newest.to(self.dtype)]
        for depth in range(noise_embeds.shape[1] - 1):
            if depth:
                embeds = embed(output(state.to(newest.dtype)).argmax(-1))
                positions = positions[:, -1:] + 1
            state = self._run(embeds, state, positions, attention_mask, cache)[:, -1:]
            states.append(state)
        # The generator takes K + 1 entries off the cache; K - 1 are those of drafts.
        heads = self.config.num_key_value_heads
        width = self.config.head_dim
        unused = states[0].new_zeros(1, heads, 2, width)
        cache.update(unused, unused, 0)
        return BaseModelOutput(last_hidden_state=torch.cat(states, dim=1))

    def _run(
        self, embeds: Tensor, state: Tensor, positions: Tensor, mask: Tensor | None, cache: Any
    ) -> Tensor:
        embeds = embeds.to(self.dtype).masked_fill((positions == 0)[..., None], 0)  # as vLLM does
        x = self.input_proj(torch.cat([self.hidden_norm(state), self.embed_norm(embeds)], dim=-1))
        first = cache.get_seq_length()
        Q = x.shape[1]
        seen = self.keys_seen(Q, first, first + Q, mask)
        none = x[:, :0]
        return self.final_norm(self.layer(x, none, self.rotary_emb(x, positions), seen, cache))
