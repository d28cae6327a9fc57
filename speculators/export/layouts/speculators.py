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
from draftsmith.speculators.export.layouts.base import Fault, Fields
from draftsmith.speculators.export.layouts.dflash import (
    ANCHOR,
    SECTION,
    DFlash2Layout,
    DFlashLayout,
    DSparkLayout,
)
from draftsmith.speculators.export.layouts.eagle3 import SWITCHES, Eagle3Layout
from draftsmith.speculators.export.layouts.peagle import PEagleLayout

# vLLM reads these at the top.
TOP = ("draft_vocab_size", "target_hidden_size", "eagle_aux_hidden_state_layer_ids", *SWITCHES)
# model_type of the layer -> architecture
NATIVE = {"llama": "LlamaForCausalLMEagle3", "qwen3": "Qwen3ForCausalLM"}
LAYER, TAPS = "transformer_layer_config", "aux_hidden_state_layer_ids"
NON_CAUSAL = "sliding_window_non_causal"
COMMON = ("dtype", "tie_word_embeddings", "draftsmith")  # beside the layer, for any family
TYPES = ("eagle3", "peagle", "dflash", "dflash2", "dspark")  # of speculators_model_type, read here


class _Speculators:
    """The fields of vLLM's own format at their places here, and back."""

    formats: ClassVar[tuple[str, ...]] = ("speculators",)
    family: ClassVar[str]
    speculator: ClassVar[str]  # `architectures` of config.json
    version: ClassVar[str] = "0.9.0"  # of the format that the fields are in
    top: ClassVar[tuple[str, ...]]  # fields beside the layer's

    def recognises(self, fields: Mapping[str, Any], names: set[str]) -> bool:
        return fields.get("speculators_model_type") == self.family

    def no_sglang(self, config: Any) -> str:
        return "it does not read this format"

    def flat(self, fields: dict[str, Any]) -> dict[str, Any]:
        """The fields of vLLM's own format -> this format's, those of the layer among them."""
        return fields

    def native(self, fields: dict[str, Any], where: str) -> dict[str, Any]:
        """The inverse of `flat`."""
        return fields

    def drafts(self, fields: Mapping[str, Any]) -> int:
        """Of a round, where nobody says how many."""
        return base.NUM_SPECULATIVE_TOKENS

    def to_engine(self, fields: dict[str, Any]) -> dict[str, Any]:
        own = fields["draftsmith"]
        target = own.get("target") or {}
        if not target.get("name_or_path"):
            raise ConfigError(
                "config.json names the target, and this drafter knows"
                " none; name it (draftsmith export --model TARGET)",
                where="export format speculators",
            )
        flat = self.flat(fields)
        outer = {name: flat[name] for name in (*self.top, "dtype", "tie_word_embeddings")}
        tokens = own.get("num_speculative_tokens") or self.drafts(flat)
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
            "draftsmith": own,
        }

    def from_engine(self, fields: Fields, where: str) -> Fields:
        kind, layer = fields.get("speculators_model_type"), fields.get(LAYER)
        if kind != self.family:
            known = ", ".join(TYPES)
            raise CheckpointError(f"speculators_model_type {kind!r}; expected {known}", where=where)
        if not isinstance(layer, Mapping):
            raise CheckpointError(
                f"{LAYER} is missing; it holds the fields of the layer", where=where
            )
        given = [name for name in (*self.top, *COMMON) if fields.get(name) is not None]
        return self.native({**layer, **{name: fields[name] for name in given}}, where)


class SpeculatorsEagle3Layout(_Speculators, Eagle3Layout):
    """EAGLE-3."""

    speculator, version, top = "Eagle3Speculator", "0.4.0", TOP

    def recognises(self, fields: Mapping[str, Any], names: set[str]) -> bool:
        """Algorithms that are not known as well, so that `from_engine` names them."""
        return "speculators_model_type" in fields or "speculators_config" in fields

    def native(self, fields: dict[str, Any], where: str) -> dict[str, Any]:
        # without a word vLLM takes the normed state for the residual here, and the other one in its
        # own format
        return {"norm_before_residual": True, **fields, "architectures": [_native(fields, where)]}


class SpeculatorsPEagleLayout(_Speculators, PEagleLayout):
    """P-EAGLE. vLLM does not pass on the switches of EAGLE-3.1."""

    speculator, top = "PEagleSpeculator", (*TOP, "mask_token_id", "num_depths")

    def check(self, config: Any, format_: str) -> None:
        super().check(config, format_)
        if lost := [name for name in ("fc_norm", "norm_output") if getattr(config, name)]:
            raise ConfigError(
                f"vLLM does not read {', '.join(lost)} of a peagle"
                " drafter there; write it in vLLM's own format (--format vllm)",
                where="export format speculators",
            )

    def drafts(self, fields: Mapping[str, Any]) -> int:
        return fields["num_depths"]

    def from_engine(self, fields: Fields, where: str) -> Fields:
        """The drafts of a round are the depths trained, where no other number is said."""
        methods = (fields.get("speculators_config") or {}).get("proposal_methods") or [{}]
        return {
            "num_depths": methods[0].get("speculative_tokens") or 8,
            **super().from_engine(fields, where),
        }

    def native(self, fields: dict[str, Any], where: str) -> dict[str, Any]:
        return {**fields, "architectures": [_native(fields, where)]}


class _Block(_Speculators):
    """Block drafters: all of their fields at the top, but those of the layers."""

    architectures: ClassVar[tuple[str, ...]]

    top: ClassVar[tuple[str, ...]] = ("draft_vocab_size", "target_hidden_size", "mask_token_id")
    top += ("block_size", TAPS, ANCHOR, NON_CAUSAL)

    def flat(self, fields: dict[str, Any]) -> dict[str, Any]:
        flat: dict[str, Any] = {ANCHOR: False, **fields, **fields[SECTION]}
        flat |= {TAPS: [i + 1 for i in flat["target_layer_ids"]], NON_CAUSAL: not flat["is_causal"]}
        gone = (SECTION, "target_layer_ids", "is_causal", "causal", "num_target_layers")
        return {name: value for name, value in flat.items() if name not in gone}

    def native(self, fields: dict[str, Any], where: str) -> dict[str, Any]:
        causal = self.causal(fields)
        ids = {} if TAPS not in fields else {"target_layer_ids": [i - 1 for i in fields.pop(TAPS)]}
        said = {"is_causal": causal, SECTION: {"causal": causal}}
        return {ANCHOR: False, **fields, **ids, **said, "architectures": [self.architectures[0]]}

    def causality_faults(self, plain: Fields) -> Iterator[Fault]:
        return iter(())

    def field_faults(self, fields: Fields, plain: Fields, names: set[str]) -> Iterator[Fault]:
        known = base.SLIDING in (plain.get("layer_types") or []) or "draftsmith" in fields
        if fields.get(NON_CAUSAL) is False and not known:
            text = f"{NON_CAUSAL} is false, so that the block is causal"
            engines = "in vLLM it is causal, in the speculators library it is not"
            yield Fault(NON_CAUSAL, text, engines, warning=True)
        yield from super().field_faults(fields, plain, names)  # type: ignore[misc]

    def causal(self, fields: Mapping[str, Any]) -> bool:
        """As vLLM has it: of all layers, not of sliding ones alone as the name says."""
        return not fields.get(NON_CAUSAL, True)

    def drafts(self, fields: Mapping[str, Any]) -> int:
        return fields["block_size"] - (not fields[ANCHOR])


class SpeculatorsDFlashLayout(_Block, DFlashLayout):
    """DFlash."""

    speculator = "DFlashSpeculator"


class SpeculatorsDFlash2Layout(_Block, DFlash2Layout):
    """DFlash 2."""

    speculator, top = "DFlash2Speculator", (*_Block.top, *DFlash2Layout.own)


class SpeculatorsDSparkLayout(_Block, DSparkLayout):
    """DSpark. vLLM reads no causality here: sliding layers are causal, and full ones are not."""

    speculator = "DSparkSpeculator"
    top = (*_Block.top, *(name for name in DSparkLayout.own if name != ANCHOR))

    def check(self, config: Any, format_: str) -> None:
        super().check(config, format_)
        if config.is_causal != (config.sliding_window is not None):
            raise ConfigError(
                f"is_causal {config.is_causal} with sliding_window"
                f" {config.sliding_window}: there dspark's sliding layers are causal, full ones are"
                " not; write it in vLLM's own format (--format vllm)",
                where="export format speculators",
            )

    def causal(self, fields: Mapping[str, Any]) -> bool:
        return base.SLIDING in (fields.get("layer_types") or ())


def _native(fields: Mapping[str, Any], where: str) -> str:
    """The architecture in vLLM's own format of an EAGLE-3 head."""
    model_type = fields.get("model_type", "llama")
    if model_type not in NATIVE:
        expected = " or ".join(NATIVE)
        raise CheckpointError(
            f"{LAYER}.model_type {model_type!r}; expected {expected}", where=where
        )
    return NATIVE[model_type]
