"""The format of heads that plain transformers runs (`generate(…, speculation_type="dflash")`).

Beside the weights lies the file with the modules (export/remote_code.py), which transformers loads
with `trust_remote_code`. The target's own head reads what they return, at its width and over its
vocabulary."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from draftsmith.speculators.config import DrafterConfig
from draftsmith.speculators.drafter import Drafter
from draftsmith.speculators.errors import ConfigError
from draftsmith.speculators.export import remote_code
from draftsmith.speculators.export.layouts import base
from draftsmith.speculators.export.layouts.base import Fields, FolderContents, Layout
from draftsmith.speculators.export.layouts.dflash import SECTION, DFlashLayout
from draftsmith.speculators.export.layouts.format import Format
from draftsmith.speculators.export.layouts.mtp import NAMES, MtpLayout

NAME = "transformers"
MODULE = "modeling_draftsmith"  # the name of the file beside the weights
WINDOW = "attention_window"  # transformers would give a `sliding_window` a cache that drops keys


class TransformersFormat(Format):
    """config.json as transformers' Auto classes read it."""

    def __init__(self, layout: Layout, head: type[remote_code.DraftsmithHead]) -> None:
        """`head`: the class of remote_code.py that runs the drafter."""
        super().__init__(layout, NAME)
        self.head = head

    def no_vllm(self, config: Any) -> str:
        """See `Format.no_vllm`."""
        return "it does not read the file of modules"

    def no_sglang(self, config: Any) -> str:
        """See `Format.no_sglang`."""
        return "it does not read the file of modules"

    def write(
        self, drafter: Drafter, config: DrafterConfig, folder: Path, dtype: torch.dtype
    ) -> None:
        """See `Format.write`: the file of modules as well."""
        super().write(drafter, config, folder, dtype)
        shutil.copyfile(remote_code.__file__, folder / f"{MODULE}.py")

    def to_engine(self, fields: dict[str, Any]) -> dict[str, Any]:
        """See `Format.to_engine`."""
        config_class: Any = self.head.config_class
        return fields | {
            "architectures": [self.head.__name__],
            "model_type": config_class.model_type,
            "auto_map": {
                "AutoConfig": f"{MODULE}.{config_class.__name__}",
                "AutoModel": f"{MODULE}.{self.head.__name__}",
            },
            "layer_types": [base.FULL] * fields["num_hidden_layers"],
            WINDOW: fields.get("sliding_window"),
            "sliding_window": None,
            "use_sliding_window": False,
        }


class TransformersDFlash(TransformersFormat):
    """DFlash in the transformers format."""

    def __init__(self) -> None:
        super().__init__(DFlashLayout(), remote_code.DraftsmithDFlash)

    def to_engine(self, fields: dict[str, Any]) -> dict[str, Any]:
        """See `Format.to_engine`: transformers' generator reads two fields at the top."""
        section = fields[SECTION]
        read = {name: section[name] for name in ("target_layer_ids", "mask_token_id")}
        return super().to_engine(fields) | read | {"qk_norm": True}

    def from_engine(self, fields: Fields, where: str) -> Fields:
        """See `Format.from_engine`."""
        window = fields.get(WINDOW)
        kind = base.FULL if window is None else base.SLIDING
        return {
            **fields,
            "architectures": [self.layout.architectures[0]],
            "sliding_window": window,
            "layer_types": [kind] * fields["num_hidden_layers"],
            "use_sliding_window": window is not None,
        }


class TransformersMtp(TransformersFormat):
    """An MTP module with a layer of its own, in the transformers format. transformers' `use_mtp` is
    for modules of the target's kind in the target's own checkpoint."""

    def __init__(self) -> None:
        super().__init__(PlainMtpLayout(), remote_code.DraftsmithMtp)

    def check(self, config: Any, format_: str) -> None:
        """See `Format.check`."""
        if (config.layout, config.hidden_state) != ("mimo", "normed"):
            raise ConfigError(
                f"layout {config.layout}, hidden_state {config.hidden_state}: a layer of its own"
                " and normed states run there; put other modules into their target's checkpoint"
                " (draftsmith export --into)",
                where=f"export format {NAME}",
            )

    def to_engine(self, fields: dict[str, Any]) -> dict[str, Any]:
        """See `Format.to_engine`: one tap, the last layer's output, which transformers norms."""
        last = fields["draftsmith"]["num_target_layers"] - 1
        wiring = {"attention_bias": True, "qk_norm": False, "is_causal": True}
        read = {"target_layer_ids": [last], "block_size": 2, "mask_token_id": 0}
        return super().to_engine(fields) | wiring | read


class PlainMtpLayout(MtpLayout):
    """An MTP module in a folder of its own, under the names of its class in remote_code.py."""

    def belongs(self, name: str, config: Any) -> bool:
        """See `Layout.belongs`: no target is in the folder."""
        return True

    def name_in_file(self, name: str, config: Any) -> str:
        """See `Layout.name_in_file`: the same."""
        return name

    def from_config(self, contents: FolderContents) -> DrafterConfig:
        """See `Layout.from_config`, which tells modules apart by their prefix."""
        names = {NAMES["mimo"].prefix + name for name in contents.names}
        return super().from_config(replace(contents, names=names))
