"""A decoder layer of transformers as part of a draft head, for heads that are one more layer of
their target.

The layer is transformers' own class, built from the target's configuration, so that its maths and
the names of its tensors are the target's. Its attention passes query, key and value to the current
`attend`, of training or of drafting. Experts are separate tensors in files
(`experts.{i}.gate_proj`), while transformers keeps them in one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoConfig, PretrainedConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3DecoderLayer,
    DeepseekV3RotaryEmbedding,
)
from transformers.models.qwen3_next.modeling_qwen3_next import (
    Qwen3NextDecoderLayer,
    Qwen3NextRotaryEmbedding,
)

from draftsmith.speculators.errors import ConfigError
from draftsmith.speculators.layers.decoder import Asked, Attend, ExactBuffers, Rotary

NAME = "draftsmith_attend"
# Fields of a configuration that say nothing of a layer, and differ between a model, its folder and
# an export.
_ELSEWHERE = set(
    "_name_or_path architectures auto_map dtype torch_dtype transformers_version use_cache"
    " quantization_config num_nextn_predict_layers draftsmith mtp_hidden_state pad_token_id"
    " bos_token_id eos_token_id output_router_logits initializer_range".split()
)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float,
    **others: Any,
) -> tuple[Tensor, None]:
    """query [B, h, T, d], key [B, g, T, d], value [B, g, T, v] -> [B, T, h, v], by `attend`."""
    return module.attend(query, key, value, scaling).transpose(1, 2), None


AttentionInterface.register(NAME, _attention)


def layer_fields(config: PretrainedConfig | Mapping[str, Any]) -> dict[str, Any]:
    """What builds one layer of a model, as JSON, the same from the model and its config.json."""
    if not isinstance(config, PretrainedConfig):
        config = AutoConfig.for_model(**{k: v for k, v in config.items() if k not in _ELSEWHERE})
    fields = json.loads(json.dumps(config.to_diff_dict(), default=str))
    return {name: value for name, value in fields.items() if name not in _ELSEWHERE}


class BorrowedLayer(ExactBuffers):
    """One layer of the architecture of `layer_fields`, of the kind that follows its last."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        super().__init__()
        config = AutoConfig.for_model(**fields)
        config._attn_implementation = NAME
        config._experts_implementation = "grouped_mm"
        if config.model_type == "deepseek_v3":
            self.block = DeepseekV3DecoderLayer(config, config.num_hidden_layers)
            self._rotary: Any = DeepseekV3RotaryEmbedding
        elif config.model_type == "qwen3_next":
            config.layer_types = ["full_attention"]
            self.block = Qwen3NextDecoderLayer(config, 0)
            self._rotary = Qwen3NextRotaryEmbedding
        else:
            raise ConfigError(
                "no layer of it can be borrowed", where=f"model_type {config.model_type!r}"
            )
        self._config = config

    def norm(self) -> nn.Module:
        """A fresh norm of the layer's own kind, as wide as its input."""
        return type(self.block.input_layernorm)(
            self._config.hidden_size, eps=self._config.rms_norm_eps
        )

    def rotary_embedding(self) -> nn.Module:
        """A fresh module of the target's own rotary embedding."""
        return self._rotary(self._config)

    def forward(
        self, state: Tensor, rotary: Rotary, attend: Attend, queries: Asked = None
    ) -> Tensor:
        """state [B, T, H] -> the layer's output before any final norm, of every slot."""
        self.block.self_attn.attend = attend
        try:
            return self.block(state, position_embeddings=rotary, attention_mask=None)
        finally:
            self.block.self_attn.attend = None


# ---------------------------------------------------------------------- names in files


def unpack_experts(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A module's state under the names of checkpoints, with separate matrices per expert."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in state.items():
        stem, _, part = name.rpartition(".experts.")
        if not stem or tensor.dim() != 3:
            tensors[name] = tensor
            continue
        for i, expert in enumerate(tensor):
            pieces = {part: expert}
            if part == "gate_up_proj":
                pieces = dict(zip(("gate_proj", "up_proj"), expert.chunk(2)))
            for piece, value in pieces.items():
                tensors[f"{stem}.experts.{i}.{piece}.weight"] = value
    return tensors


def pack_experts(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `unpack_experts`."""
    packed: dict[str, Tensor] = {}
    experts: dict[str, dict[int, dict[str, Tensor]]] = {}
    for name, tensor in state.items():
        stem, _, rest = name.rpartition(".experts.")
        number, _, part = rest.partition(".")
        if stem and number.isdigit():
            expert = experts.setdefault(stem, {}).setdefault(int(number), {})
            expert[part.removesuffix(".weight")] = tensor
        else:
            packed[name] = tensor
    for stem, numbered in experts.items():
        in_order = [numbered[i] for i in sorted(numbered)]
        gate_up = [torch.cat([one["gate_proj"], one["up_proj"]]) for one in in_order]
        packed[f"{stem}.experts.gate_up_proj"] = torch.stack(gate_up)
        packed[f"{stem}.experts.down_proj"] = torch.stack([one["down_proj"] for one in in_order])
    return packed
