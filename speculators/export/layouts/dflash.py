"""The layouts of block drafters that vLLM and SGLang load: DFlash, DSpark, DFlash 2.

Both engines take the attention in a block from `is_causal`, vLLM from `dflash_config.causal` as
well; without either a sliding layer is causal and a full one is not, so both are always written.
Taps are numbered by layer outputs, one less than ours. DSpark's fields lie at the top, DFlash's
below `dflash_config`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor
from typing_extensions import override

from draftsmith.speculators.config import DrafterConfig
from draftsmith.speculators.errors import ConfigError
from draftsmith.speculators.export.layouts import base
from draftsmith.speculators.export.layouts.base import Fault, Fields, FolderContents, Layout
from draftsmith.speculators.export.layouts.eagle3 import TAPS
from draftsmith.speculators.families.dflash2 import DFlash2Shape
from draftsmith.speculators.families.dspark import DSparkShape
from draftsmith.speculators.registry import build_config

SECTION = "dflash_config"
ANCHOR = "sample_from_anchor"  # read of every family, and refused of all but DSpark
NO_CONFIDENCE = "vLLM drafts without confidences, SGLang refuses it"
NO_CPU_RUNNER = "on a GPU: vLLM's runner for CPUs has no such drafter"
ALIASES = {"midlayer.": "layers.0.", "encoder.fc.": "fc."}
ALIASES["encoder.output_norm_enc."] = "hidden_norm."


class DFlashLayout(Layout):
    """The backbone: taps, mask token and causality below `dflash_config`."""

    family = "dflash"
    architectures: ClassVar[tuple[str, ...]] = ("DFlashDraftModel",)
    # Fields below `dflash_config`.
    nested: ClassVar[tuple[str, ...]] = (
        "mask_token_id",
        "target_layer_ids",
        "block_size",
        "causal",
    )
    # Fields of the family's config that are written under the same names.
    own_fields: ClassVar[tuple[str, ...]] = ()
    ignored = ("t2d",)
    sglang_algorithm = "DFLASH"
    sglang_chain = False

    @override
    def recognises(self, fields: Fields, names: set[str]) -> bool:
        return "hidden_norm.weight" in base.bare_names(names) or SECTION in fields

    @override
    def check(self, config: Any, format_: str) -> None:
        if 0 in config.tap_layers:
            raise ConfigError(
                "engines read outputs of layers for block drafters; 0 is the embedding",
                where=f"drafter.tap_layers {list(config.tap_layers)}",
            )
        if format_ not in ("sglang", "transformers"):
            return
        faults = {
            "it drafts over the target's whole vocabulary": config.reduced_vocabulary,
            "it drafts at the target's width": config.hidden_size != config.target_hidden_size,
            "tap_layers: it cannot read the last one": config.num_target_layers
            in config.tap_layers,
        }
        if named := [fault for fault, there in faults.items() if there]:
            raise ConfigError(
                f"{'; '.join(named)}; serve it with vLLM", where=f"export format {format_}"
            )

    @override
    def field_faults(self, fields: Fields, plain: Fields, names: set[str]) -> Iterator[Fault]:
        section = plain.get(SECTION) or {}
        sizes = {plain.get("block_size"), section.get("block_size")} - {None}
        if len(sizes) > 1:
            text = f"block_size is {plain['block_size']}, below {SECTION} {section['block_size']}"
            yield Fault("block_size", f"{text}; write the block that was trained at both places")
        yield from self.causality_faults(plain)
        if plain.get("sliding_window") and base.SLIDING in (plain.get("layer_types") or []):
            if not (plain.get("use_sliding_window") or section.get("swa_window_size")):
                text = "sliding layers, but use_sliding_window is not true; set it"
                yield Fault("use_sliding_window", text, "engines lose sliding_window and refuse it")
        ids = section.get("target_layer_ids") or plain.get("target_layer_ids") or ()
        if (taps := plain.get(TAPS)) and list(taps) != [i + 1 for i in ids]:
            text = f"{TAPS} is {list(taps)}, target_layer_ids {list(ids)}; take the former away"
            yield Fault(TAPS, text, "vLLM reads the former, SGLang the latter")

    def causality_faults(self, plain: Fields) -> Iterator[Fault]:
        """vLLM goes by `is_causal`, or else `dflash_config.causal`, or else the windows; SGLang by
        `is_causal` alone. Under another mask than in training little is accepted."""
        top = plain.get("is_causal")
        nested = (plain.get(SECTION) or {}).get("causal")
        if top is None and nested is None:
            kind = "causal" if is_causal(plain) else "bidirectional"
            text = f"neither is_causal nor {SECTION}.causal: taken for {kind}"
            yield Fault("is_causal", text, f"engines take it for {kind}", warning=True)
            return
        windows_imply = base.SLIDING in (plain.get("layer_types") or [])
        by_is_causal = windows_imply if top is None else top
        by_section = by_is_causal if nested is None else nested
        if by_section != by_is_causal:
            text = f"is_causal is {top}, {SECTION}.causal {nested}; write both as it was trained"
            yield Fault("is_causal", text, "vLLM reads either, SGLang is_causal alone")

    # -------------------------------------------------------------- tensors

    @override
    def canonical(self, tensors: dict[str, Tensor], config: DrafterConfig) -> dict[str, Tensor]:
        def canonical(name: str) -> str:
            plain = name.removeprefix("model.")
            alias = next((short for short in ALIASES if plain.startswith(short)), None)
            return plain if alias is None else ALIASES[alias] + plain.removeprefix(alias)

        return {canonical(name): tensor for name, tensor in tensors.items()}

    # -------------------------------------------------------------- fields

    @override
    def to_config(self, config: Any) -> dict[str, Any]:
        window = config.sliding_window
        section = {
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": [tap - 1 for tap in config.tap_layers],
            "block_size": config.block_size,
            "causal": config.is_causal,
            **{name: getattr(config, name) for name in self.own_fields},
        }
        return {
            "architectures": [self.architectures[0]],
            "model_type": "qwen3",
            "vocab_size": config.vocab_size,
            "draft_vocab_size": config.draft_vocab_size,
            "target_hidden_size": config.target_hidden_size,
            **config.llama_fields(),
            "attention_bias": False,
            "tie_word_embeddings": False,
            "layer_types": [base.FULL if window is None else base.SLIDING] * config.num_layers,
            "sliding_window": window,
            # or transformers' Qwen3Config forgets the window
            "use_sliding_window": window is not None,
            "is_causal": config.is_causal,
            "block_size": config.block_size,
            "num_target_layers": config.num_target_layers,
            **{name: value for name, value in section.items() if name not in self.nested},
            SECTION: {name: section[name] for name in self.nested},
            "dtype": config.dtype,
            **base.own_fields(config),
        }

    @override
    def from_config(self, contents: FolderContents) -> DrafterConfig:
        fields = contents.fields
        where = contents.where
        section = {**fields, **(fields.get(SECTION) or {})}
        layers = fields.get("num_target_layers") or contents.layers
        replace(contents, fields=section).require("mask_token_id", "target_layer_ids")
        named = [name for name in (*self.own_fields, ANCHOR) if section.get(name) is not None]
        return build_config(
            where,
            self.family,
            **replace(contents, layers=layers).head_fields(self.architectures),
            tap_layers=tuple(layer + 1 for layer in section["target_layer_ids"]),
            block_size=fields.get("block_size") or section.get("block_size", 16),
            mask_token_id=section["mask_token_id"],
            sliding_window=_window(fields, where),
            is_causal=is_causal(fields),
            **{name: section[name] for name in named},
        )


class DSparkLayout(DFlashLayout):
    """With Markov and confidence heads; engines read only `causal` of it below `dflash_config`."""

    family = "dspark"
    no_vllm_int8 = "int8 weights of dspark were not run in vLLM; export without --quantize"
    architectures: ClassVar[tuple[str, ...]] = ("Qwen3DSparkModel",)
    nested = ("causal",)
    own_fields = (*DSparkShape.model_fields, "markov_head_type")
    without: ClassVar = {
        "d2t": base.REFUSES,
        "lm_head.weight": base.REFUSES,
        "confidence_head.proj.weight": NO_CONFIDENCE,
        "confidence_head.proj.bias": NO_CONFIDENCE,
        **DFlashLayout.without,
    }
    vllm_note = NO_CPU_RUNNER
    sglang_algorithm = "DSPARK"
    sglang_block = "speculative-dspark-block-size"

    @override
    def recognises(self, fields: Fields, names: set[str]) -> bool:
        return any(name.startswith("markov_head.") for name in base.bare_names(names))

    @override
    def field_faults(self, fields: Fields, plain: Fields, names: set[str]) -> Iterator[Fault]:
        section = plain.get(SECTION) or {}
        for name in (*self.own_fields, "block_size"):
            if name in section and plain.get(name) is None:
                text = f"{name} stands below {SECTION} alone; write it at the top"
                yield Fault(name, text, "engines refuse it")
        yield from super().field_faults(fields, plain, names)


class DFlash2Layout(DFlashLayout):
    """With convolutions and the selector, whose codebooks have no `.weight`."""

    family = "dflash2"
    no_vllm_int8 = "int8 weights of dflash2 were not run in vLLM; export without --quantize"
    architectures: ClassVar[tuple[str, ...]] = ("DFlash2DraftModel",)
    own_fields = tuple(DFlash2Shape.model_fields)
    nested = (*DFlashLayout.nested, *own_fields)
    vllm_method: ClassVar = {"method": "dflash"}
    vllm_note = NO_CPU_RUNNER

    @override
    def recognises(self, fields: Fields, names: set[str]) -> bool:
        return any(name.startswith("candidate_selector.") for name in base.bare_names(names))


def is_causal(fields: Mapping[str, Any]) -> bool:
    """As vLLM has it: `is_causal`, `dflash_config.causal`, or what the layers' windows imply."""
    causal = fields.get("is_causal")
    if causal is None:
        causal = (fields.get(SECTION) or {}).get("causal")
    if causal is None:
        return base.SLIDING in (fields.get("layer_types") or [])
    return bool(causal)


def _window(fields: Mapping[str, Any], where: str) -> int | None:
    """As `base.window_of`; a section `dflash_config` has the last word."""
    section = fields.get(SECTION) or {}
    kinds = [base.SLIDING] if section.get("use_swa") else fields.get("layer_types")
    width = section.get("swa_window_size") or fields.get("sliding_window")
    return base.window_of({"layer_types": kinds, "sliding_window": width}, where)
