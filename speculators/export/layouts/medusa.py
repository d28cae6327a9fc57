"""The Medusa checkpoint layout that vLLM loads, and that of FasterDecoding's published heads."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor
from typing_extensions import override

from draftsmith.speculators.config import DrafterConfig
from draftsmith.speculators.export.layouts import base
from draftsmith.speculators.export.layouts.base import Fault, Fields, FolderContents, Layout
from draftsmith.speculators.registry import build_config

_PUBLISHED_BLOCK = re.compile(r"^(?:medusa_head\.)?(\d+)\.(\d+)\.linear\.(weight|bias)$")
_PUBLISHED_HEAD = re.compile(r"^(?:medusa_head\.)?(\d+)\.(\d+)\.weight$")


class MedusaLayout(Layout):
    """`blocks.{head}.layers.{block}` and `lm_heads.{head}`."""

    family = "medusa"
    no_vllm_int8 = "vLLM's Medusa heads read plain weights alone; export without --quantize"
    architectures = ("MedusaModel",)
    bare = False
    ignored = ("t2d",)
    reduced_in_engines = "vLLM's Medusa wants a row for each token, and refuses it"
    without: ClassVar = {"": base.REFUSES}
    vllm_samples = False
    last_vllm = "0.32"
    vllm_note = "vLLM up to 0.32; 0.33 dropped Medusa, and this project's runtime serves it"

    @override
    def recognises(self, fields: Fields, names: set[str]) -> bool:
        return fields.get("model_type") == "medusa" or any(
            name.startswith(("blocks.", "lm_heads.")) or _PUBLISHED_BLOCK.match(name)
            for name in names
        )

    @override
    def no_vllm(self, config: Any) -> str:
        if not config.reduced_vocabulary:
            return ""
        return f"{self.reduced_in_engines}; this project's runtime serves it"

    @override
    def name_in_file(self, name: str, config: Any) -> str:
        if config.shared_lm_head:
            name = name.replace("lm_heads.0.", "lm_head.")
        return re.sub(r"^blocks\.(\d+)\.(\d+)\.linear", r"blocks.\1.layers.\2", name)

    @override
    def field_faults(self, fields: Fields, plain: Fields, names: set[str]) -> Iterator[Fault]:
        named = fields.get("medusa_fc_bias")
        if not named and any(name.endswith(".bias") for name in names):
            text = "the blocks have biases, and medusa_fc_bias is not true; set it"
            yield Fault("medusa_fc_bias", text, "vLLM drops the biases")

    @override
    def to_config(self, config: Any) -> dict[str, Any]:
        return {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "hidden_size": config.hidden_size,
            "vocab_size": config.vocab_size,
            **base.reduced_field(config),
            "num_heads": config.num_heads,
            "num_hidden_layers": config.num_layers,
            "medusa_fc_bias": config.fc_bias,
            "original_lm_head": config.shared_lm_head,
            "dtype": config.dtype,
            **base.own_fields(config),
        }

    def from_config(self, contents: FolderContents) -> DrafterConfig:
        """Published heads leave width and vocabulary to their base model: these must be added."""
        fields = dict(contents.fields)
        for name, published in (("num_heads", "heads"), ("num_hidden_layers", "layers")):
            fields[name] = fields.get(name) or fields.get(f"medusa_num_{published}")
        sizes = ("num_heads", "num_hidden_layers", "hidden_size", "vocab_size")
        replace(contents, fields=fields).require(*sizes)
        # Published heads have no such field; where it is there, lost tensors are noticed.
        biased = bool(fields.get("medusa_fc_bias"))
        biased = biased or any(name.endswith(".bias") for name in contents.names)
        return build_config(
            contents.where,
            "medusa",
            vocab_size=fields["vocab_size"],
            draft_vocab_size=fields.get("draft_vocab_size") or fields["vocab_size"],
            hidden_size=fields["hidden_size"],
            target_hidden_size=fields["hidden_size"],
            num_target_layers=contents.target_layers(),
            num_heads=fields["num_heads"],
            num_layers=fields["num_hidden_layers"],
            fc_bias=biased,
            shared_lm_head=bool(fields.get("original_lm_head", False)),
            dtype=contents.dtype,
        )

    def canonical(self, tensors: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
        """FasterDecoding's names: `{head}.{block}.linear.weight`, `{head}.{blocks}.weight`."""
        named = {}
        for name, tensor in tensors.items():
            if match := _PUBLISHED_BLOCK.match(name):
                name = f"blocks.{match[1]}.layers.{match[2]}.{match[3]}"
            elif (match := _PUBLISHED_HEAD.match(name)) and int(match[2]) == config.num_layers:
                name = f"lm_heads.{match[1]}.weight"
            named[name] = tensor
        return named
