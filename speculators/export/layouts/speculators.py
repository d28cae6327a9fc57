"""The format of vLLM's speculators library: config.json names the target, so that the folder alone
is served.

The tensors are those of the native layout. The layer's fields lie below `transformer_layer_config`,
the family's beside it, and `speculators_config` says which target and how many drafts. Taps are
numbered as ours."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from draftsmith.speculators.errors import CheckpointError, ConfigError
from draftsmith.speculators.export.layouts import base
from draftsmith.speculators.export.layouts.base import Fault, Fields, Layout
from draftsmith.speculators.export.layouts.dflash import (
    ANCHOR,
    SECTION,
    DFlash2Layout,
    DFlashLayout,
    DSparkLayout,
)
from draftsmith.speculators.export.layouts.eagle3 import SWITCHES, Eagle3Layout
from draftsmith.speculators.export.layouts.format import Format
from draftsmith.speculators.export.layouts.peagle import PEagleLayout

NAME = "speculators"
WHERE = f"export format {NAME}"  # of errors
# model_type of the layer -> architecture in vLLM's own format
NATIVE_ARCHITECTURES = {"llama": "LlamaForCausalLMEagle3", "qwen3": "Qwen3ForCausalLM"}
LAYER = "transformer_layer_config"
TAPS = "aux_hidden_state_layer_ids"
NON_CAUSAL = "sliding_window_non_causal"
# Fields that vLLM reads at the top of config.json, beside the layer's section.
EAGLE3_TOP = (
    "draft_vocab_size",
    "target_hidden_size",
    "eagle_aux_hidden_state_layer_ids",
    *SWITCHES,
)
BLOCK_TOP = (
    "draft_vocab_size",
    "target_hidden_size",
    "mask_token_id",
    "block_size",
    TAPS,
    ANCHOR,
    NON_CAUSAL,
)
COMMON = ("dtype", "tie_word_embeddings", "draftsmith")  # at the top as well, for any family
TYPES = ("eagle3", "peagle", "dflash", "dflash2", "dspark")  # of speculators_model_type, read here


class SpeculatorsFormat(Format):
    """The fields of vLLM's own format at their places here, and back.

    What differs from family to family is in `to_flat`, `to_native` and `default_drafts`."""

    version: ClassVar[str] = "0.9.0"  # of the format that the fields are in

    def __init__(self, layout: Layout, speculator: str, top: tuple[str, ...]) -> None:
        """`speculator`: `architectures` of config.json; `top`: fields beside the layer's."""
        super().__init__(layout, NAME)
        self.speculator = speculator
        self.top = top

    def recognises(self, fields: Fields, names: set[str]) -> bool:
        """See `Format.recognises`: folders of the library always name the family."""
        return fields.get("speculators_model_type") == self.family

    def no_sglang(self, config: Any) -> str:
        """See `Format.no_sglang`."""
        return "it does not read this format"

    def to_flat(self, fields: dict[str, Any]) -> dict[str, Any]:
        """The fields of vLLM's own format -> this format's, those of the layer among them."""
        return fields

    def to_native(self, fields: dict[str, Any], where: str) -> dict[str, Any]:
        """The inverse of `to_flat`; CheckpointError names `where`."""
        return fields

    def default_drafts(self, flat: Fields) -> int:
        """Drafts of a round, where the export does not say how many; `flat`: as of `to_flat`."""
        return base.NUM_SPECULATIVE_TOKENS

    def to_engine(self, fields: dict[str, Any]) -> dict[str, Any]:
        """See `Format.to_engine`. ConfigError if the drafter knows no target."""
        section = fields["draftsmith"]
        target = section.get("target") or {}
        if not target.get("name_or_path"):
            raise ConfigError(
                "config.json names the target, and this drafter knows"
                " none; name it (draftsmith export --model TARGET)",
                where=WHERE,
            )
        flat = self.to_flat(fields)
        outer = {name: flat[name] for name in (*self.top, "dtype", "tie_word_embeddings")}
        tokens = section.get("num_speculative_tokens") or self.default_drafts(flat)
        method = {"proposal_type": "greedy", "speculative_tokens": tokens, "verifier_accept_k": 1}
        beside = (*outer, "architectures", "draftsmith")
        return {
            "architectures": [self.speculator],
            "speculators_model_type": self.family,
            "speculators_version": self.version,
            **outer,
            LAYER: {name: value for name, value in flat.items() if name not in beside},
            "speculators_config": {
                "algorithm": self.family,
                "default_proposal_method": "greedy",
                "proposal_methods": [method | {"accept_tolerance": 0.0}],
                "verifier": {"architectures": [], **target},
            },
            "draftsmith": section,
        }

    def from_engine(self, fields: Fields, where: str) -> Fields:
        """See `Format.from_engine`."""
        kind = fields.get("speculators_model_type")
        layer = fields.get(LAYER)
        if kind != self.family:
            known = ", ".join(TYPES)
            raise CheckpointError(f"speculators_model_type {kind!r}; expected {known}", where=where)
        if not isinstance(layer, Mapping):
            raise CheckpointError(
                f"{LAYER} is missing; it holds the fields of the layer", where=where
            )
        present = [name for name in (*self.top, *COMMON) if fields.get(name) is not None]
        return self.to_native({**layer, **{name: fields[name] for name in present}}, where)


class SpeculatorsEagle3(SpeculatorsFormat):
    """EAGLE-3 in the speculators format."""

    version = "0.4.0"

    def __init__(self) -> None:
        super().__init__(Eagle3Layout(), "Eagle3Speculator", EAGLE3_TOP)

    def recognises(self, fields: Fields, names: set[str]) -> bool:
        """Algorithms that are not known as well, so that `from_engine` names them."""
        return "speculators_model_type" in fields or "speculators_config" in fields

    def to_native(self, fields: dict[str, Any], where: str) -> dict[str, Any]:
        """See `SpeculatorsFormat.to_native`. Without a word vLLM takes the normed state for the
        residual here, and the other one in its own format."""
        architecture = _native_architecture(fields, where)
        return {"norm_before_residual": True, **fields, "architectures": [architecture]}


class SpeculatorsPEagle(SpeculatorsFormat):
    """P-EAGLE in the speculators format. vLLM does not pass on the switches of EAGLE-3.1."""

    def __init__(self) -> None:
        top = (*EAGLE3_TOP, "mask_token_id", "num_depths")
        super().__init__(PEagleLayout(), "PEagleSpeculator", top)

    def check(self, config: Any, format_: str) -> None:
        """See `Format.check`."""
        super().check(config, format_)
        if lost := [name for name in ("fc_norm", "norm_output") if getattr(config, name)]:
            raise ConfigError(
                f"vLLM does not read {', '.join(lost)} of a peagle"
                " drafter there; write it in vLLM's own format (--format vllm)",
                where=WHERE,
            )

    def default_drafts(self, flat: Fields) -> int:
        """All depths that were trained."""
        return flat["num_depths"]

    def from_engine(self, fields: Fields, where: str) -> Fields:
        """See `Format.from_engine`. The depths trained are the drafts of a round, where no other
        number stands there."""
        methods = (fields.get("speculators_config") or {}).get("proposal_methods") or [{}]
        return {
            "num_depths": methods[0].get("speculative_tokens") or 8,
            **super().from_engine(fields, where),
        }

    def to_native(self, fields: dict[str, Any], where: str) -> dict[str, Any]:
        """See `SpeculatorsFormat.to_native`."""
        return {**fields, "architectures": [_native_architecture(fields, where)]}


class SpeculatorsBlocks(SpeculatorsFormat):
    """Block drafters: all of their fields at the top, but those of the layers."""

    def to_flat(self, fields: dict[str, Any]) -> dict[str, Any]:
        """See `SpeculatorsFormat.to_flat`: what stands below `dflash_config` comes to the top."""
        flat: dict[str, Any] = {ANCHOR: False, **fields, **fields[SECTION]}
        flat |= {TAPS: [i + 1 for i in flat["target_layer_ids"]], NON_CAUSAL: not flat["is_causal"]}
        gone = (SECTION, "target_layer_ids", "is_causal", "causal", "num_target_layers")
        return {name: value for name, value in flat.items() if name not in gone}

    def to_native(self, fields: dict[str, Any], where: str) -> dict[str, Any]:
        """See `SpeculatorsFormat.to_native`."""
        causal = self.is_causal(fields)
        ids = {} if TAPS not in fields else {"target_layer_ids": [i - 1 for i in fields.pop(TAPS)]}
        return {
            ANCHOR: False,
            **fields,
            **ids,
            "is_causal": causal,
            SECTION: {"causal": causal},
            "architectures": [self.layout.architectures[0]],
        }

    def field_faults(self, fields: Fields, plain: Fields, names: set[str]) -> Iterator[Fault]:
        """See `Format.field_faults`. The two libraries read one field as two things."""
        known = base.SLIDING in (plain.get("layer_types") or []) or "draftsmith" in fields
        if fields.get(NON_CAUSAL) is False and not known:
            text = f"{NON_CAUSAL} is false, so that the block is causal"
            engines = "in vLLM it is causal, in the speculators library it is not"
            yield Fault(NON_CAUSAL, text, engines, warning=True)
        yield from super().field_faults(fields, plain, names)

    def is_causal(self, flat: Fields) -> bool:
        """As vLLM has it: of all layers, not of sliding ones alone as the field's name says."""
        return not flat.get(NON_CAUSAL, True)

    def default_drafts(self, flat: Fields) -> int:
        """All slots of a block that predict a token."""
        return flat["block_size"] - (not flat[ANCHOR])


class SpeculatorsDFlash(SpeculatorsBlocks):
    """DFlash in the speculators format."""

    def __init__(self) -> None:
        super().__init__(DFlashLayout(), "DFlashSpeculator", BLOCK_TOP)


class SpeculatorsDFlash2(SpeculatorsBlocks):
    """DFlash 2 in the speculators format."""

    def __init__(self) -> None:
        super().__init__(
            DFlash2Layout(), "DFlash2Speculator", (*BLOCK_TOP, *DFlash2Layout.own_fields)
        )


class SpeculatorsDSpark(SpeculatorsBlocks):
    """DSpark in the speculators format. vLLM reads no causality here: sliding layers are causal,
    and full ones are not."""

    def __init__(self) -> None:
        more = [name for name in DSparkLayout.own_fields if name != ANCHOR]
        super().__init__(DSparkLayout(), "DSparkSpeculator", (*BLOCK_TOP, *more))

    def check(self, config: Any, format_: str) -> None:
        """See `Format.check`."""
        super().check(config, format_)
        if config.is_causal != (config.sliding_window is not None):
            raise ConfigError(
                f"is_causal {config.is_causal} with sliding_window"
                f" {config.sliding_window}: there dspark's sliding layers are causal, full ones are"
                " not; write it in vLLM's own format (--format vllm)",
                where=WHERE,
            )

    def is_causal(self, flat: Fields) -> bool:
        """As the layers' windows imply."""
        return base.SLIDING in (flat.get("layer_types") or ())


def _native_architecture(fields: Fields, where: str) -> str:
    """The architecture in vLLM's own format of an EAGLE-3 head."""
    model_type = fields.get("model_type", "llama")
    if model_type not in NATIVE_ARCHITECTURES:
        expected = " or ".join(NATIVE_ARCHITECTURES)
        raise CheckpointError(
            f"{LAYER}.model_type {model_type!r}; expected {expected}", where=where
        )
    return NATIVE_ARCHITECTURES[model_type]
