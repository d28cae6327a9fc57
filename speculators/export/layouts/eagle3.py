"""The EAGLE-3 checkpoint layout that vLLM and SGLang load."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from speculators.config import DrafterConfig, default_tap_layers
from speculators.export.layouts.base import (
    COMMON_MEANINGS,
    LAYER_MEANINGS,
    WINDOW_MEANINGS,
    Fields,
    Layout,
    Table,
    architecture_of,
    head_fields,
    layer_rows,
    own_fields,
    owns_embeddings,
    same_names,
    window_fields,
    window_of,
)
from speculators.registry import build_config

ARCHITECTURES = (
    "LlamaForCausalLMEagle3",
    "Eagle3LlamaForCausalLM",
    "LlamaForCausalLM",
    "Qwen3ForCausalLM",
    "Eagle3Qwen3ForCausalLM",
)
TAPS, SECTION = "eagle_aux_hidden_state_layer_ids", "eagle_config"
SWITCHES = ("norm_before_fc", "fc_norm", "norm_output", "norm_before_residual")


MEANINGS = {
    "architectures": (
        "`LlamaForCausalLMEagle3`; `Qwen3ForCausalLM` for a layer with norms of queries and keys"
    ),
    "model_type": "`llama`, or `qwen3` for that layer",
    "vocab_size": "the target's vocabulary",
    "draft_vocab_size": "tokens the head can propose; below vocab_size there is a `d2t`",
    "target_hidden_size": "width of the target's states",
    **LAYER_MEANINGS,
    **WINDOW_MEANINGS,
    "attention_bias": "false",
    "mlp_bias": "false",
    "tie_word_embeddings": "false",
    "eagle_aux_hidden_state_layer_ids": (
        "taps: 0 is the embedding output, i the output of layer i - 1; ascending"
    ),
    "num_aux_hidden_states": "their number, without which vLLM takes it for three",
    "norm_before_fc": "one norm over all taps (EAGLE-3.1)",
    "fc_norm": "a norm per tap (EAGLE-3.1)",
    "norm_output": "the normed state is fed back (EAGLE-3.1)",
    "norm_before_residual": "the residual is the normed state",
    **COMMON_MEANINGS,
}


class Eagle3Layout(Layout):
    """Names as vLLM's loader has them; one layer is called `midlayer`."""

    family = "eagle3"
    meanings: ClassVar = MEANINGS
    ignored = ("t2d",)

    def recognises(self, fields: Mapping[str, Any], names: set[str]) -> bool:
        layer = any(name.endswith(".hidden_norm.weight") for name in names)
        return layer and architecture_of(fields) in ARCHITECTURES

    def tensors(self, config: Any) -> Table:
        H, taps, width = config.hidden_size, len(config.tap_layers), config.target_hidden_size
        shapes: dict[str, tuple[int, ...]] = {"fc.weight": (H, taps * width)}
        if config.norm_before_fc:
            shapes["input_norm.weight"] = (taps * width,)
        if config.fc_norm:
            shapes |= {f"fc_norm.{i}.weight": (width,) for i in range(taps)}
        table = same_names(shapes)
        for i in range(config.num_layers):
            outside = "midlayer" if config.num_layers == 1 else f"layers.{i}"
            rows = layer_rows(config, inputs=2 * H if i == 0 else H)
            if i == 0:
                rows["hidden_norm.weight"] = (H,)
            table |= {
                f"{outside}.{name}": (f"layers.{i}.{name}", shape) for name, shape in rows.items()
            }
        shapes = {"norm.weight": (H,), "lm_head.weight": (config.draft_vocab_size, H)}
        if config.own_embeddings:
            shapes["embed_tokens.weight"] = (config.vocab_size, H)
        return table | same_names(shapes)

    def to_config(self, config: Any) -> dict[str, Any]:
        return {
            "architectures": ["Qwen3ForCausalLM" if config.qk_norm else "LlamaForCausalLMEagle3"],
            "model_type": "qwen3" if config.qk_norm else "llama",
            "vocab_size": config.vocab_size,
            "draft_vocab_size": config.draft_vocab_size,
            "target_hidden_size": config.target_hidden_size,
            **config.llama_fields(),
            **window_fields(config),
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
            "dtype": config.dtype,
            "eagle_aux_hidden_state_layer_ids": list(config.tap_layers),
            "num_aux_hidden_states": len(config.tap_layers),
            **{switch: getattr(config, switch) for switch in SWITCHES},
            **own_fields(config),
        }

    def plain(self, fields: Mapping[str, Any], where: str) -> Mapping[str, Any]:
        """Taps where SGLang has them, which numbers them by layer outputs, as taps."""
        theirs = (fields.get(SECTION) or {}).get(TAPS)
        return (
            fields
            if fields.get(TAPS) or not theirs
            else {**fields, TAPS: [tap + 1 for tap in theirs]}
        )

    def from_config(
        self, fields: Fields, names: set[str], where: str, num_target_layers: int | None
    ) -> DrafterConfig:
        fields = self.plain(fields, where)
        head = head_fields(fields, num_target_layers, where, "an EAGLE-3 head", ARCHITECTURES)
        return build_config(
            where,
            self.family,
            **head,
            tap_layers=tuple(
                sorted(fields.get(TAPS) or default_tap_layers(head["num_target_layers"]))
            ),
            qk_norm=fields.get("model_type") == "qwen3",
            own_embeddings=owns_embeddings(fields, names),
            sliding_window=window_of(fields, where),
            **{switch: bool(fields.get(switch, False)) for switch in SWITCHES},
            **self.more_fields(fields, where),
        )

    def more_fields(self, fields: Mapping[str, Any], where: str) -> dict[str, Any]:
        """Fields of a family that is EAGLE-3 and more."""
        return {}

    def canonical(self, found: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
        if config.num_layers > 1:
            return found
        return {
            (
                name.replace("layers.0.", "midlayer.", 1) if name.startswith("layers.0.") else name
            ): tensor
            for name, tensor in found.items()
        }
