"""The P-EAGLE layout that vLLM loads: EAGLE-3's with what fills unknown slots."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor
from typing_extensions import override

from draftsmith.speculators.export.layouts.base import REFUSES, Fields, bare_names
from draftsmith.speculators.export.layouts.eagle3 import Eagle3Layout

MASK = "mask_hidden"
TOKENS = ("mask_token_id", "pard_token", "ptd_token_id")  # where vLLM looks for the mask token


class PEagleLayout(Eagle3Layout):
    """vLLM serves it by `eagle3` with `parallel_drafting`, whatever depths were trained."""

    family = "peagle"
    without: ClassVar = {MASK: REFUSES, **Eagle3Layout.without}
    vllm_method: ClassVar = {"method": "eagle3", "parallel_drafting": True}
    sglang_algorithm = None

    @override
    def recognises(self, fields: Fields, names: set[str]) -> bool:
        masks = MASK in bare_names(names) or any(name in fields for name in TOKENS)
        return masks and super().recognises(fields, names)

    @override
    def to_config(self, config: Any) -> dict[str, Any]:
        depths = {"mask_token_id": config.mask_token_id, "num_depths": config.num_depths}
        return super().to_config(config) | depths

    @override
    def more_fields(self, fields: Fields) -> dict[str, Any]:
        token = next((fields[name] for name in TOKENS if fields.get(name) is not None), None)
        return {
            "num_depths": fields.get("num_depths", 8),
            **({} if token is None else {"mask_token_id": token}),
        }

    @override
    def canonical(self, tensors: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
        tensors = super().canonical(tensors, config)
        if MASK in tensors and tensors[MASK].shape[:-1].numel() == 1:
            tensors[MASK] = tensors[MASK].flatten()
        return tensors
