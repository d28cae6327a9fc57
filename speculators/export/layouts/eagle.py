"""The EAGLE-1 checkpoint layout that vLLM and SGLang load."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from typing_extensions import override

from draftsmith.speculators.config import DrafterConfig
from draftsmith.speculators.export.layouts import base
from draftsmith.speculators.export.layouts.base import Fault, Fields, FolderContents, Layout
from draftsmith.speculators.registry import build_config

ARCHITECTURES = ("EagleLlamaForCausalLM", "LlamaForCausalLM")
# Config fields of a published head that only the names of its tensors tell. Our own folders state
# them too, so that a missing tensor is noticed.
BY_NAME = {
    "own_embeddings": "embed_tokens.weight",
    "fc_bias": "fc.bias",
    "attention_bias": "layers.0.self_attn.q_proj.bias",
}


class EagleLayout(Layout):
    """Names as vLLM's loader has them, which refuses a norm after the last layer and a head."""

    family = "eagle"
    ids_beside = True
    reduced_in_engines = (
        f"{base.SCORES_ALL}; SGLang takes these alone with --speculative-token-map (docs/serve.md)"
    )
    architectures: ClassVar[tuple[str, ...]] = ARCHITECTURES
    sglang_algorithm = "EAGLE"

    @override
    def recognises(self, fields: Fields, names: set[str]) -> bool:
        return "fc.weight" in base.bare_names(names) or "Eagle" in base.architecture_of(fields)

    @override
    def no_sglang(self, config: Any) -> str:
        return "its names are others"

    @override
    def field_faults(self, fields: Fields, plain: Fields, names: set[str]) -> Iterator[Fault]:
        biases = {name for name in names if name.endswith(".bias")}
        if "fc.bias" in biases:
            yield Fault("fc.bias", "fc has a bias; train without it", "vLLM drops it")
        if biases - {"fc.bias"} and not (fields.get("qkv_bias") or fields.get("attention_bias")):
            text = "queries, keys and values have biases; set qkv_bias: true"
            yield Fault("qkv_bias", text, "vLLM drops them")
        yield from base.ignored_window(plain, layers=False)
        flags = ("bias", "attention_bias", "qkv_bias")
        yield from base.other_computation(fields, flags, names)

    @override
    def to_config(self, config: Any) -> dict[str, Any]:
        section = base.own_fields(config)
        section["draftsmith"] |= {field: getattr(config, field) for field in BY_NAME}
        section["draftsmith"] |= base.reduced_field(config)
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
            **section,
        }

    @override
    def from_config(self, contents: FolderContents) -> DrafterConfig:
        named = {field: tensor in contents.names for field, tensor in BY_NAME.items()}
        switches = {field: contents.section.get(field, by_name) for field, by_name in named.items()}
        head = contents.head_fields(self.architectures)
        return build_config(contents.where, "eagle", **head, **switches)
