"""The P-EAGLE layout that vLLM loads: EAGLE-3's with the state of unknown slots and their token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from speculators.export.layouts.base import Table
from speculators.export.layouts.eagle3 import MEANINGS, Eagle3Layout

MASK = "mask_hidden"
TOKENS = (
    "mask_token_id",
    "pard_token",
    "ptd_token_id",
)  # names of the mask token, as vLLM looks for them


class PEagleLayout(Eagle3Layout):
    """vLLM serves it by the method `eagle3` with `parallel_drafting`. It does not know how many
    depths were trained."""

    family = "peagle"
    meanings: ClassVar = {
        **MEANINGS,
        "mask_token_id": "token whose embedding fills the slots without a known token",
        "num_depths": (
            "depths trained: more drafts than these are refused here, and untrained in vLLM"
        ),
    }

    def recognises(self, fields: Mapping[str, Any], names: set[str]) -> bool:
        return (MASK in names or any(name in fields for name in TOKENS)) and super().recognises(
            fields, names
        )

    def tensors(self, config: Any) -> Table:
        return super().tensors(config) | {
            MASK: (MASK, (len(config.tap_layers) * config.target_hidden_size,))
        }

    def to_config(self, config: Any) -> dict[str, Any]:
        own = {"mask_token_id": config.mask_token_id, "num_depths": config.num_depths}
        return super().to_config(config) | own

    def more_fields(self, fields: Mapping[str, Any], where: str) -> dict[str, Any]:
        token = next((fields[name] for name in TOKENS if fields.get(name) is not None), None)
        return {
            "num_depths": fields.get("num_depths", 8),
            **({} if token is None else {"mask_token_id": token}),
        }

    def canonical(self, found: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
        found = super().canonical(found, config)
        if MASK in found and found[MASK].shape[:-1].numel() == 1:
            found[MASK] = found[MASK].flatten()
        return found
