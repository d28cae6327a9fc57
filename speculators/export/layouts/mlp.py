"""IBM's layout of MLP speculators, `MLPSpeculatorPreTrainedModel`."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from draftsmith.speculators.config import DrafterConfig
from draftsmith.speculators.errors import CheckpointError
from draftsmith.speculators.export.layouts import base
from draftsmith.speculators.export.layouts.base import Fields, FolderContents, Layout
from draftsmith.speculators.registry import build_config

ARCHITECTURE = "MLPSpeculatorPreTrainedModel"
SWITCHES = ("tie_weights", "scale_input")
_NAME = re.compile(r"speculator\.(?P<part>emb|proj|ln|head)\.(?P<index>\d+)\.(?P<rest>weight|bias)")


class MLPLayout(Layout):
    """Tensors are numbered by their heads; of tied ones the lowest is written, any is read."""

    family = "mlp"
    bare = False
    ignored = ("t2d",)
    in_vllm = False

    @override
    def recognises(self, fields: Fields, names: set[str]) -> bool:
        return any(name.startswith("speculator.") for name in names)

    @override
    def no_vllm(self, config: Any) -> str:
        return "vLLM has no model of an MLP speculator since 0.32; this project's runtime serves it"

    @override
    def name_in_file(self, name: str, config: Any) -> str:
        return f"speculator.{name.replace('heads.', 'head.', 1)}"

    @override
    def to_config(self, config: Any) -> dict[str, Any]:
        return {
            "architectures": [ARCHITECTURE],
            "model_type": "mlp_speculator",
            "vocab_size": config.vocab_size,
            **base.reduced_field(config),
            "emb_dim": config.target_hidden_size,
            "inner_dim": config.inner_dim,
            "n_predict": config.n_predict,
            "top_k_tokens_per_head": [1] * config.n_predict,  # a chain, which is what was measured
            "n_candidates": 1,
            **{switch: getattr(config, switch) for switch in SWITCHES},
            "dtype": config.dtype,
            **base.own_fields(config),
        }

    @override
    def from_config(self, contents: FolderContents) -> DrafterConfig:
        fields = contents.fields
        contents.require("vocab_size", "emb_dim", "n_predict")
        return build_config(
            contents.where,
            "mlp",
            vocab_size=fields["vocab_size"],
            draft_vocab_size=fields.get("draft_vocab_size") or fields["vocab_size"],
            hidden_size=fields.get("inner_dim") or fields["emb_dim"],
            target_hidden_size=fields["emb_dim"],
            num_target_layers=contents.target_layers(),
            n_predict=fields["n_predict"],
            dtype=contents.dtype,
            **{switch: bool(fields.get(switch, False)) for switch in SWITCHES},
        )

    def canonical(self, tensors: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
        """One copy of every tied tensor. CheckpointError if copies in the file differ."""
        kept: dict[str, Tensor] = {}
        first_name: dict[str, str] = {}
        for name in sorted(tensors):
            stored = _kept(name, config)
            if stored in kept and not torch.equal(kept[stored], tensors[name]):
                raise CheckpointError(
                    f"{first_name[stored]} and {name} differ, but config.json says"
                    " tie_weights: true; set it to false if the heads were trained apart",
                    where="tie_weights",
                )
            kept.setdefault(stored, tensors[name])
            first_name.setdefault(stored, name)
        return kept


def _kept(name: str, config: Any) -> str:
    """A tensor's own name, or that of the first head it is tied to."""
    match = _NAME.fullmatch(name)
    if match is None or not config.tie_weights or int(match["index"]) >= config.n_predict:
        return name
    # the first projection reads another width
    first = min(int(match["index"]), 1) if match["part"] == "proj" else 0
    return f"speculator.{match['part']}.{first}.{match['rest']}"
