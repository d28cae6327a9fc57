"""DFlash heads that plain transformers runs (`generate(…, speculation_type="dflash")`).

Beside the weights lies the file with the modules (export/remote_code.py), which transformers loads
with `trust_remote_code`. The target's own head reads what they return, so that a head of another
width or vocabulary has no place here."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, ClassVar

import torch

from draftsmith.speculators.config import DrafterConfig
from draftsmith.speculators.drafter import Drafter
from draftsmith.speculators.export import remote_code
from draftsmith.speculators.export.layouts import base
from draftsmith.speculators.export.layouts.base import Fields
from draftsmith.speculators.export.layouts.dflash import SECTION, DFlashLayout

MODULE = "modeling_draftsmith"  # the name of the file beside the weights
WINDOW = "attention_window"  # transformers would give a `sliding_window` a cache that drops keys


class TransformersDFlashLayout(DFlashLayout):
    """config.json as transformers' Auto classes read it."""

    formats: ClassVar[tuple[str, ...]] = ("transformers",)

    def no_vllm(self, config: Any) -> str:
        return "it does not read the file of modules"

    def no_sglang(self, config: Any) -> str:
        return "it does not read the file of modules"

    def write(
        self, drafter: Drafter, config: DrafterConfig, folder: Path, dtype: torch.dtype
    ) -> None:
        super().write(drafter, config, folder, dtype)
        shutil.copyfile(remote_code.__file__, folder / f"{MODULE}.py")

    def to_engine(self, fields: dict[str, Any]) -> dict[str, Any]:
        head, section = remote_code.DraftsmithDFlash, fields[SECTION]
        return fields | {
            "architectures": [head.__name__],
            "model_type": head.config_class.model_type,
            "auto_map": {
                "AutoConfig": f"{MODULE}.{head.config_class.__name__}",
                "AutoModel": f"{MODULE}.{head.__name__}",
            },
            "layer_types": [base.FULL] * fields["num_hidden_layers"],
            WINDOW: fields.get("sliding_window"),
            "sliding_window": None,
            "use_sliding_window": False,
            **{name: section[name] for name in ("target_layer_ids", "mask_token_id")},
        }

    def from_engine(self, fields: Fields, where: str) -> Fields:
        window = fields.get(WINDOW)
        kinds = [base.FULL if window is None else base.SLIDING] * fields["num_hidden_layers"]
        windows = {"layer_types": kinds, "use_sliding_window": window is not None}
        own = {"architectures": [self.architectures[0]], "sliding_window": window}
        return {**fields, **own, **windows}
