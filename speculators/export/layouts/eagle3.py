"""The EAGLE-3 checkpoint layout that vLLM and SGLang load."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from torch import Tensor
from typing_extensions import override

from draftsmith.speculators.config import DrafterConfig, default_tap_layers
from draftsmith.speculators.export.layouts import base
from draftsmith.speculators.export.layouts.base import Fault, Fields, FolderContents, Layout
from draftsmith.speculators.registry import build_config

ARCHITECTURES = (
    *("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "LlamaForCausalLM"),
    *("Qwen3ForCausalLM", "Eagle3Qwen3ForCausalLM"),
    # which vLLM reads alike
    *("Eagle3Qwen2_5vlForCausalLM", "Eagle3Qwen3vlForCausalLM", "Eagle3MiniMaxM2ForCausalLM"),
    *("PEagleDraftModel", "PeagleLlamaForCausalLM", "PeagleQwen3ForCausalLM"),
)
TAPS = "eagle_aux_hidden_state_layer_ids"
SECTION = "eagle_config"
COUNT = "num_aux_hidden_states"
SWITCHES = ("norm_before_fc", "fc_norm", "norm_output", "norm_before_residual")


class Eagle3Layout(Layout):
    """Names as vLLM's loader has them; one layer is called `midlayer`."""

    family = "eagle3"
    architectures: ClassVar = ARCHITECTURES
    ignored = ("t2d",)
    without: ClassVar = {
        "d2t": "vLLM takes every draft id for a target id, and accepts next to nothing",
        "lm_head.weight": "vLLM takes the target's for a whole vocabulary, else accepts nothing",
        **Layout.without,
    }
    sglang_algorithm: ClassVar[str | None] = "EAGLE3"
    # The folder is SGLang's own, which names the taps below `eagle_config`.
    taps_in_section: ClassVar[bool] = False

    @override
    def recognises(self, fields: Fields, names: set[str]) -> bool:
        bare = base.bare_names(names)
        return (
            "d2t" in bare
            or any(n.startswith("midlayer.") or n.endswith(".hidden_norm.weight") for n in bare)
            or any(field in fields for field in (TAPS, "draft_vocab_size", SECTION))
        )

    @override
    def no_sglang(self, config: Any) -> str:
        return "its tap numbers and names are others"

    @override
    def name_in_file(self, name: str, config: Any) -> str:
        one = config.num_layers == 1 and name.startswith("layers.0.")
        return name.replace("layers.0", "midlayer", 1) if one else name

    @override
    def to_config(self, config: Any) -> dict[str, Any]:
        window = config.sliding_window
        return {
            "architectures": ["Qwen3ForCausalLM" if config.qk_norm else "LlamaForCausalLMEagle3"],
            "model_type": "qwen3" if config.qk_norm else "llama",
            "vocab_size": config.vocab_size,
            "draft_vocab_size": config.draft_vocab_size,
            "target_hidden_size": config.target_hidden_size,
            **config.llama_fields(),
            **({} if window is None else {"sliding_window": window, "use_sliding_window": True}),
            **({} if window is None else {"layer_types": [base.SLIDING] * config.num_layers}),
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
            "dtype": config.dtype,
            "eagle_aux_hidden_state_layer_ids": list(config.tap_layers),
            "num_aux_hidden_states": len(config.tap_layers),
            **{switch: getattr(config, switch) for switch in SWITCHES},
            **base.own_fields(config),
        }

    def from_engine(self, fields: Fields, where: str) -> Fields:
        """Taps where SGLang has them, which numbers them by layer outputs, as taps."""
        if not _only_in_section(fields):
            return fields
        return {**fields, TAPS: [tap + 1 for tap in fields[SECTION][TAPS]]}

    @override
    def field_faults(self, fields: Fields, plain: Fields, names: set[str]) -> Iterator[Fault]:
        taps = plain.get(TAPS)
        count = plain.get(COUNT)
        if not taps:
            text = f"{TAPS} is missing; write the layers that it was trained on"
            yield Fault(TAPS, text, "vLLM taps layers of its own choice, 2, n/2 and n-3")
        elif not self.taps_in_section and _only_in_section(fields):
            text = f"taken for layer outputs, the taps {taps}; write {TAPS} at the top"
            engines = "vLLM takes them for taps; SGLang, whose section it is, for layer outputs"
            yield Fault(f"{SECTION}.{TAPS}", text, engines, warning=True)
        elif len(taps) != (count or 3):
            text = f"{COUNT} is {count or 'missing, so 3'}, but there are {len(taps)} tap ids"
            yield Fault(COUNT, text, base.REFUSES)
        yield from base.ignored_window(plain)
        yield from base.other_computation(fields, ("attention_bias",), names)

    @override
    def unexpected(self, name: str) -> Fault:
        if name.endswith("_proj.bias") and ".self_attn." in name:
            text = f"{name} is unexpected; this version has no such head"
            return Fault(name, text, "vLLM adds it if attention_bias is true, else drops it")
        return super().unexpected(name)

    @override
    def from_config(self, contents: FolderContents) -> DrafterConfig:
        fields = contents.fields
        head = contents.head_fields(ARCHITECTURES)
        taps = fields.get(TAPS) or default_tap_layers(head["num_target_layers"])
        return build_config(
            contents.where,
            self.family,
            **head,
            tap_layers=tuple(sorted(taps)),
            qk_norm=fields.get("model_type") == "qwen3",
            own_embeddings=contents.owns_embeddings,
            sliding_window=base.window_of(fields, contents.where),
            **{switch: bool(fields.get(switch, False)) for switch in SWITCHES},
            **self.more_fields(fields),
        )

    def more_fields(self, fields: Fields) -> dict[str, Any]:
        """Fields of a family that is EAGLE-3 and more."""
        return {}

    @override
    def canonical(self, tensors: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
        return {self.name_in_file(name, config): tensor for name, tensor in tensors.items()}


def _only_in_section(fields: Fields) -> bool:
    """True if the taps stand below `eagle_config` alone."""
    section = fields.get(SECTION) or {}
    return bool(section.get(TAPS)) and not fields.get(TAPS)
