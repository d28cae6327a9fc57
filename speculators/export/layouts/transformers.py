"""The layouts of heads that plain transformers runs (`generate(…, speculation_type="dflash")`).

Beside the weights lies the file with the modules (export/remote_code.py), which transformers loads
with `trust_remote_code`. The target's own head reads what they return, at its width and over its
vocabulary."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from draftsmith.speculators.config import DrafterConfig
from draftsmith.speculators.drafter import Drafter
from draftsmith.speculators.errors import ConfigError
from draftsmith.speculators.export import remote_code
from draftsmith.speculators.export.layouts import base
from draftsmith.speculators.export.layouts.base import Fields, Source
from draftsmith.speculators.export.layouts.dflash import DFlashLayout
from draftsmith.speculators.export.layouts.mtp import NAMES, MtpLayout

MODULE = "modeling_draftsmith"  # the name of the file beside the weights
WINDOW = "attention_window"  # transformers would give a `sliding_window` a cache that drops keys


class _Transformers:
    """config.json as transformers' Auto classes read it."""

    formats: ClassVar[tuple[str, ...]] = ("transformers",)
    head: ClassVar[Any]  # the class in the file

    def no_vllm(self, config: Any) -> str:
        return "it does not read the file of modules"

    def no_sglang(self, config: Any) -> str:
        return "it does not read the file of modules"

    def write(
        self, drafter: Drafter, config: DrafterConfig, folder: Path, dtype: torch.dtype
    ) -> None:
        super().write(drafter, config, folder, dtype)  # type: ignore[misc]
        shutil.copyfile(remote_code.__file__, folder / f"{MODULE}.py")

    def to_engine(self, fields: dict[str, Any]) -> dict[str, Any]:
        windows = {WINDOW: fields.get("sliding_window"), "sliding_window": None}
        windows |= {"use_sliding_window": False}
        return fields | {
            "architectures": [self.head.__name__],
            "model_type": self.head.config_class.model_type,
            "auto_map": {
                "AutoConfig": f"{MODULE}.{self.head.config_class.__name__}",
                "AutoModel": f"{MODULE}.{self.head.__name__}",
            },
            "layer_types": [base.FULL] * fields["num_hidden_layers"],
            **windows,
        }


class TransformersDFlashLayout(_Transformers, DFlashLayout):
    """DFlash."""

    head = remote_code.DraftsmithDFlash

    def to_engine(self, fields: dict[str, Any]) -> dict[str, Any]:
        section = fields["dflash_config"]
        read = {name: section[name] for name in ("target_layer_ids", "mask_token_id")}
        return super().to_engine(fields) | read | {"qk_norm": True}

    def from_engine(self, fields: Fields, where: str) -> Fields:
        window = fields.get(WINDOW)
        kinds = [base.FULL if window is None else base.SLIDING] * fields["num_hidden_layers"]
        windows = {"layer_types": kinds, "use_sliding_window": window is not None}
        own = {"architectures": [self.architectures[0]], "sliding_window": window}
        return {**fields, **own, **windows}


class TransformersMtpLayout(_Transformers, MtpLayout):
    """An MTP module with a layer of its own. transformers' `use_mtp` is for modules of the target's
    kind in the target's own checkpoint."""

    head = remote_code.DraftsmithMtp
    vllm_arguments = ""

    def check(self, config: Any, format_: str) -> None:
        if (config.layout, config.hidden_state) != ("mimo", "normed"):
            raise ConfigError(
                f"layout {config.layout}, hidden_state {config.hidden_state}: a layer of its own"
                " and normed states run there; put other modules into their target's checkpoint"
                " (draftsmith export --into)",
                where="export format transformers",
            )

    def recognises(self, fields: Fields, names: set[str]) -> bool:
        return self.head.__name__ in (fields.get("architectures") or ())

    def belongs(self, name: str, config: Any) -> bool:
        return True

    def name_in_file(self, name: str, config: Any) -> str:
        return name

    def from_config(self, source: Source) -> DrafterConfig:
        names = {NAMES["mimo"].prefix + name for name in source.names}
        return super().from_config(replace(source, names=names))

    def to_engine(self, fields: dict[str, Any]) -> dict[str, Any]:
        last = fields["draftsmith"]["num_target_layers"] - 1  # transformers norms its output
        wiring = {"attention_bias": True, "qk_norm": False, "is_causal": True}
        read = {"target_layer_ids": [last], "block_size": 2, "mask_token_id": 0}
        return super().to_engine(fields) | wiring | read
