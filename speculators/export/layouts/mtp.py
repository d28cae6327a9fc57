"""The checkpoint layouts of multi-token-prediction modules, in the names that their targets' own
checkpoints have.

`mimo`: `model.mtp_layers.0.*`, beside a target or in a folder of its own; `deepseek_v3`:
`model.layers.{L}.*` behind the last of L layers; `qwen3_next`: `mtp.*`. The last two carry their
target's config.json, as the layer is built from it. Repeated embeddings and heads (DeepSeek-V3) are
not read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

from torch import Tensor
from transformers import AutoConfig
from typing_extensions import override

from draftsmith.speculators.config import DrafterConfig
from draftsmith.speculators.errors import CheckpointError
from draftsmith.speculators.export.layouts import base
from draftsmith.speculators.export.layouts.base import Fields, FolderContents, Layout
from draftsmith.speculators.families.mtp import BORROWED, MtpConfig
from draftsmith.speculators.layers.target_layer import layer_fields, pack_experts, unpack_experts
from draftsmith.speculators.registry import build_config

PARTS = ("input_proj", "embed_norm", "hidden_norm", "final_norm")


class Names(NamedTuple):
    """Where a layout keeps the parts of a module; `{L}`: the number of the target's layers."""

    module: str  # pattern of a tensor's name, its group tells modules apart
    prefix: str
    layer: str
    parts: tuple[str, ...]  # PARTS
    shared: tuple[str, ...] = ()  # the target's own, repeated


NAMES: dict[str, Names] = {
    "mimo": Names(
        module=r"model\.mtp_layers\.(\d+)\.",
        prefix="model.mtp_layers.0.",
        layer="",
        parts=("input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm"),
    ),
    "deepseek_v3": Names(
        module=r"model\.layers\.(\d+)\.(?:eh_proj|enorm|hnorm|shared_head\.norm)\.",
        prefix="model.layers.{L}.",
        layer="",
        parts=("eh_proj", "enorm", "hnorm", "shared_head.norm"),
        shared=("embed_tokens.weight", "shared_head.head.weight"),
    ),
    "qwen3_next": Names(
        module=r"mtp\.layers\.(\d+)\.",
        prefix="mtp.",
        layer="layers.0.",
        parts=("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"),
    ),
}
ARCHITECTURES = {
    "mimo": "MiMoForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
}


class MtpLayout(Layout):
    """All three; which one it is, the names of the tensors say."""

    family = "mtp"
    no_vllm_int8 = (
        "vLLM reads an MTP module in its target's own quantisation; export without --quantize"
    )
    bare = False
    ids_beside = True
    reduced_in_engines = base.SCORES_ALL
    without: ClassVar = {"": base.REFUSES}
    vllm_arguments = """ --hf-overrides '{"num_nextn_predict_layers": 1}'"""
    sglang_algorithm = "EAGLE"
    exact = ("e_score_correction_bias",)

    @override
    def recognises(self, fields: Fields, names: set[str]) -> bool:
        return bool(_modules(names)[1])

    @override
    def belongs(self, name: str, config: Any) -> bool:
        prefix = _prefix(config)
        repeated = NAMES[config.layout].shared
        return name.startswith(prefix) and name.removeprefix(prefix) not in repeated

    @override
    def no_vllm(self, config: Any) -> str:
        if config.layout == "mimo":
            return ""
        return "vLLM reads it from the target's checkpoint: draftsmith export --into puts it there"

    @override
    def holds_target(self, names: set[str]) -> bool:
        return any(name.startswith("model.layers.0.") for name in names)

    @override
    def name_in_file(self, name: str, config: Any) -> str:
        names = NAMES[config.layout]
        part, _, rest = name.partition(".")
        if part == "layer":
            return _prefix(config) + names.layer + rest.removeprefix("block.")
        return f"{_prefix(config)}{names.parts[PARTS.index(part)]}.{rest}"

    @override
    def unpacked(self, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return unpack_experts(state)

    @override
    def packed(self, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return pack_experts(state)

    @override
    def to_config(self, config: Any) -> dict[str, Any]:
        section = base.own_fields(config)
        section["draftsmith"] |= base.reduced_field(config)
        layer = {"model_type": "qwen2", "vocab_size": config.vocab_size, **config.llama_fields()}
        return (layer if config.target_fields is None else dict(config.target_fields)) | {
            "architectures": [ARCHITECTURES[config.layout]],
            "num_nextn_predict_layers": 1,
            "tie_word_embeddings": False,
            "dtype": config.dtype,
            "mtp_hidden_state": config.hidden_state,
            **section,
        }

    @override
    def from_config(self, contents: FolderContents) -> DrafterConfig:
        fields = contents.fields
        names = contents.names
        where = contents.where
        layout, modules = _modules(names)
        if len(modules) != 1:
            raise CheckpointError(
                f"{len(modules)} multi-token-prediction modules beside it"
                f" ({', '.join(sorted(modules))}); expected one, run again for each further token",
                where=where,
            )
        whole = self.holds_target(names)
        usual = "residual" if whole and layout == "mimo" else "normed"
        read = {"dtype": contents.dtype, "hidden_state": fields.get("mtp_hidden_state") or usual}
        if (size := contents.section.get("draft_vocab_size")) is not None:
            read["draft_vocab_size"] = size
        contents.require("num_hidden_layers")
        if layout in BORROWED:
            return self._borrowed(fields, layout, modules, where, read)
        layers = fields["num_hidden_layers"] if whole else contents.layers
        head = replace(contents, layers=layers).head_fields() | {"num_layers": 1} | read
        return build_config(where, "mtp", layout=layout, **head)

    def _borrowed(
        self, fields: Fields, layout: str, modules: set[str], where: str, read: dict[str, Any]
    ) -> DrafterConfig:
        """The config of a module with a layer of the target's kind."""
        if fields.get("model_type") != layout:
            raise CheckpointError(
                f"tensors as {layout} names them, but model_type is {fields.get('model_type')!r}",
                where=where,
            )
        layers = fields["num_hidden_layers"]
        if layout == "deepseek_v3" and modules != {str(layers)}:
            raise CheckpointError(
                f"num_hidden_layers is {layers}, but the module is in"
                f" model.layers.{', '.join(modules)}",
                where=where,
            )
        config = AutoConfig.for_model(**layer_fields(fields))
        target: Any = SimpleNamespace(
            config=config,
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            num_layers=layers,
        )
        return build_config(where, **MtpConfig.for_target(target, "mtp") | read)


def _prefix(config: Any) -> str:
    return NAMES[config.layout].prefix.format(L=config.num_target_layers)


def _modules(names: set[str]) -> tuple[str, set[str]]:
    """The layout that the tensors are named in, and the modules' numbers."""
    for layout, known in NAMES.items():
        if modules := {match[1] for name in names if (match := re.match(known.module, name))}:
            return layout, modules
    return "mimo", set()
