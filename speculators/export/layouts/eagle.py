"""The EAGLE-1 checkpoint layout that vLLM and SGLang load."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from speculators.config import DrafterConfig
from speculators.export.layouts.base import (
    COMMON_MEANINGS,
    LAYER_MEANINGS,
    Fields,
    Layout,
    Table,
    architecture_of,
    head_fields,
    layer_rows,
    own_fields,
    same_names,
)
from speculators.registry import build_config

ARCHITECTURES = ("EagleLlamaForCausalLM", "LlamaForCausalLM", "LlamaForCausalLMEagle")
# Config fields of a published head that only the names of its tensors tell. Our own folders state
# them too, so that a missing tensor is noticed.
BY_NAME = {
    "own_embeddings": "embed_tokens.weight",
    "fc_bias": "fc.bias",
    "attention_bias": "layers.0.self_attn.q_proj.bias",
}


class EagleLayout(Layout):
    """Names as vLLM's loader has them. A norm after the last layer or a head would be errors
    there."""

    family = "eagle"
    meanings: ClassVar = {
        "architectures": "`EagleLlamaForCausalLM`; vLLM refuses `LlamaForCausalLMEagle`",
        "model_type": "`llama`",
        "vocab_size": "the target's vocabulary",
        **LAYER_MEANINGS,
        "attention_bias": "false",
        "qkv_bias": "true if queries, keys and values have biases",
        "mlp_bias": "false",
        "bias": "false; left out if fc has a bias, which vLLM drops",
        "tie_word_embeddings": "false",
        **COMMON_MEANINGS,
    }

    def recognises(self, fields: Mapping[str, Any], names: set[str]) -> bool:
        wanted = {"fc.weight", "layers.0.self_attn.q_proj.weight"}
        other = any(
            name.endswith(".hidden_norm.weight") or name == "hidden_norm.weight" for name in names
        )
        return wanted <= names and not other and architecture_of(fields) in ARCHITECTURES

    def tensors(self, config: Any) -> Table:
        H = config.hidden_size
        shapes: dict[str, tuple[int, ...]] = {"fc.weight": (H, 2 * H)}
        if config.fc_bias:
            shapes["fc.bias"] = (H,)
        for i in range(config.num_layers):
            shapes |= {
                f"layers.{i}.{name}": shape
                for name, shape in layer_rows(config, input_norm=i > 0).items()
            }
        if config.own_embeddings:
            shapes["embed_tokens.weight"] = (config.vocab_size, H)
        return same_names(shapes)

    def to_config(self, config: Any) -> dict[str, Any]:
        own = own_fields(config)
        own["draftsmith"] |= {field: getattr(config, field) for field in BY_NAME}
        return {
            "architectures": ["EagleLlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": config.vocab_size,
            **config.llama_fields(),
            "attention_bias": False,
            **({"qkv_bias": True} if config.attention_bias else {}),
            "mlp_bias": False,
            # EAGLE's own code takes a missing `bias` for a bias of fc, vLLM reads `bias: true` as
            # one of attention
            **({} if config.fc_bias else {"bias": False}),
            "tie_word_embeddings": False,
            "dtype": config.dtype,
            **own,
        }

    def from_config(
        self, fields: Fields, names: set[str], where: str, num_target_layers: int | None
    ) -> DrafterConfig:
        own = fields.get("draftsmith") or {}
        return build_config(
            where,
            "eagle",
            **head_fields(fields, num_target_layers, where, "an EAGLE head", ARCHITECTURES),
            **{field: own.get(field, tensor in names) for field, tensor in BY_NAME.items()},
        )
