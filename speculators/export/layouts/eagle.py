"""The EAGLE-1 checkpoint layout that vLLM and SGLang load."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from speculators.config import DrafterConfig, decoder_fields
from speculators.errors import CheckpointError
from speculators.export.layouts.base import (
    COMMON_MEANINGS,
    LAYER_MEANINGS,
    Layout,
    Table,
    dtype_of,
    layer_rows,
    own_fields,
    require,
    target_layers,
)
from speculators.registry import build_config

ARCHITECTURES = ("EagleLlamaForCausalLM", "LlamaForCausalLM", "LlamaForCausalLMEagle")
# What only the names of the tensors say in a published head. Our own folders say it as well, so that one of these that
# is missing is noticed: field of the config -> the tensor.
BY_NAME = {
    "own_embeddings": "embed_tokens.weight",
    "fc_bias": "fc.bias",
    "attention_bias": "layers.0.self_attn.q_proj.bias",
}


class EagleLayout(Layout):
    """Names as vLLM's loader has them. A norm after the last layer or a head would be errors there."""

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
        other = any(name.endswith(".hidden_norm.weight") or name == "hidden_norm.weight" for name in names)
        return wanted <= names and not other and (fields.get("architectures") or [""])[0] in ARCHITECTURES

    def tensors(self, config: Any) -> Table:
        H = config.hidden_size
        shapes: dict[str, tuple[int, ...]] = {"fc.weight": (H, 2 * H)}
        if config.fc_bias:
            shapes["fc.bias"] = (H,)
        for i in range(config.num_layers):
            shapes |= {f"layers.{i}.{name}": shape for name, shape in layer_rows(config, input_norm=i > 0).items()}
        if config.own_embeddings:
            shapes["embed_tokens.weight"] = (config.vocab_size, H)
        return {name: (name, shape) for name, shape in shapes.items()}

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
            # EAGLE's own code takes a missing `bias` for a bias of fc, vLLM reads `bias: true` as one of attention
            **({} if config.fc_bias else {"bias": False}),
            "tie_word_embeddings": False,
            "dtype": config.dtype,
            **own,
        }

    def from_config(
        self, fields: Mapping[str, Any], names: set[str], where: str, num_target_layers: int | None
    ) -> DrafterConfig:
        architecture = (fields.get("architectures") or ["missing"])[0]
        if architecture not in ARCHITECTURES:
            raise CheckpointError(
                f"{where}: architectures is {architecture!r}; an EAGLE head has one of {', '.join(ARCHITECTURES)}"
            )
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")
        require(fields, sizes, where, "an EAGLE head")
        own = fields.get("draftsmith") or {}
        return build_config(
            where,
            "eagle",
            vocab_size=fields["vocab_size"],
            draft_vocab_size=fields.get("draft_vocab_size") or fields["vocab_size"],
            target_hidden_size=fields.get("target_hidden_size") or fields["hidden_size"],
            num_target_layers=target_layers(fields, num_target_layers, where),
            **decoder_fields(fields),
            dtype=dtype_of(fields),
            **{field: own.get(field, tensor in names) for field, tensor in BY_NAME.items()},
        )
