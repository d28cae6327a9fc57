"""The Medusa checkpoint layout that vLLM loads, and that of FasterDecoding's published heads."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from speculators.config import DrafterConfig
from speculators.errors import CheckpointError
from speculators.export.layouts.base import (
    COMMON_MEANINGS,
    Fields,
    Layout,
    Table,
    dtype_of,
    own_fields,
    target_layers,
)
from speculators.registry import build_config

_PUBLISHED_BLOCK = re.compile(r"^(?:medusa_head\.)?(\d+)\.(\d+)\.linear\.(weight|bias)$")
_PUBLISHED_HEAD = re.compile(r"^(?:medusa_head\.)?(\d+)\.(\d+)\.weight$")


class MedusaLayout(Layout):
    """`blocks.{head}.layers.{block}` and `lm_heads.{head}`; published heads count blocks and
    projection as one list."""

    family = "medusa"
    meanings: ClassVar = {
        "architectures": "`MedusaModel`",
        "model_type": "`medusa`",
        "hidden_size": "width of the target's states",
        "vocab_size": "the target's vocabulary",
        "num_heads": "heads; one drafts one token",
        "num_hidden_layers": "residual blocks of a head",
        "medusa_fc_bias": "the blocks have a bias; vLLM drops biases without this",
        "original_lm_head": "one projection for all heads, `lm_head.weight`",
        **COMMON_MEANINGS,
    }

    def recognises(self, fields: Mapping[str, Any], names: set[str]) -> bool:
        return fields.get("model_type") == "medusa" or any(
            _PUBLISHED_BLOCK.match(name) for name in names
        )

    def tensors(self, config: Any) -> Table:
        H, V = config.hidden_size, config.vocab_size
        table: Table = {}
        for head in range(config.num_heads):
            for block in range(config.num_layers):
                outside, inside = f"blocks.{head}.layers.{block}", f"blocks.{head}.{block}.linear"
                table[f"{outside}.weight"] = (f"{inside}.weight", (H, H))
                if config.fc_bias:
                    table[f"{outside}.bias"] = (f"{inside}.bias", (H,))
        if config.shared_lm_head:
            table["lm_head.weight"] = ("lm_heads.0.weight", (V, H))
        else:
            table |= {
                f"lm_heads.{i}.weight": (f"lm_heads.{i}.weight", (V, H))
                for i in range(config.num_heads)
            }
        return table

    def to_config(self, config: Any) -> dict[str, Any]:
        return {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "hidden_size": config.hidden_size,
            "vocab_size": config.vocab_size,
            "num_heads": config.num_heads,
            "num_hidden_layers": config.num_layers,
            "medusa_fc_bias": config.fc_bias,
            "original_lm_head": config.shared_lm_head,
            "dtype": config.dtype,
            **own_fields(config),
        }

    def from_config(
        self, fields: Fields, names: set[str], where: str, num_target_layers: int | None
    ) -> DrafterConfig:
        layers = target_layers(fields, num_target_layers, where)
        heads = fields.get("num_heads") or fields.get("medusa_num_heads")
        blocks = fields.get("num_hidden_layers") or fields.get("medusa_num_layers")
        width, vocabulary = fields.get("hidden_size"), fields.get("vocab_size")
        wanted = {
            "num_heads": heads,
            "num_hidden_layers": blocks,
            "hidden_size": width,
            "vocab_size": vocabulary,
        }
        if missing := [name for name, value in wanted.items() if not value]:
            raise CheckpointError(
                f"{where}: fields {', '.join(missing)} are missing; published Medusa heads leave"
                " the sizes to their base model: add hidden_size and vocab_size of the target to"
                " config.json"
            )
        return build_config(
            where,
            "medusa",
            vocab_size=vocabulary,
            draft_vocab_size=vocabulary,
            hidden_size=width,
            target_hidden_size=width,
            num_target_layers=layers,
            num_heads=heads,
            num_layers=blocks,
            fc_bias=any(name.endswith(".bias") for name in names),
            shared_lm_head=bool(fields.get("original_lm_head", False)),
            dtype=dtype_of(fields),
        )

    def canonical(self, found: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
        """`{head}.{block}.linear.weight` and `{head}.{blocks}.weight` are FasterDecoding's
        names."""
        named = {}
        for name, tensor in found.items():
            if match := _PUBLISHED_BLOCK.match(name):
                name = f"blocks.{match[1]}.layers.{match[2]}.{match[3]}"
            elif (match := _PUBLISHED_HEAD.match(name)) and int(match[2]) == config.num_layers:
                name = f"lm_heads.{match[1]}.weight"
            named[name] = tensor
        return named
