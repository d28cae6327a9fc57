"""The format of vLLM's speculators library: config.json names the target, so that the folder alone
is served.

The tensors are those of the native layout. The layer's fields lie below `transformer_layer_config`,
the family's beside it, and `speculators_config` says which target and how many drafts. Taps are
numbered as ours. Knows no file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from speculators.errors import CheckpointError, ConfigError
from speculators.export.layouts.base import NUM_SPECULATIVE_TOKENS
from speculators.export.layouts.dflash import (
    ANCHOR,
    SECTION,
    SLIDING,
    DFlash2Layout,
    DFlashLayout,
    DSparkLayout,
)
from speculators.export.layouts.eagle3 import MEANINGS, SWITCHES, Eagle3Layout
from speculators.export.layouts.peagle import PEagleLayout

TOP = (
    "draft_vocab_size",
    "target_hidden_size",
    "eagle_aux_hidden_state_layer_ids",
    *SWITCHES,
)  # vLLM reads them here
NATIVE = {
    "llama": "LlamaForCausalLMEagle3",
    "qwen3": "Qwen3ForCausalLM",
}  # model_type of the layer -> architecture
LAYER, TAPS, NON_CAUSAL = (
    "transformer_layer_config",
    "aux_hidden_state_layer_ids",
    "sliding_window_non_causal",
)
COMMON = ("dtype", "tie_word_embeddings", "draftsmith")  # beside the layer, for any family
TYPES = (
    "eagle3",
    "peagle",
    "dflash",
    "dflash2",
    "dspark",
)  # the values of speculators_model_type that are read


def _meanings(
    family: str, speculator: str, top: tuple[str, ...], fields: Mapping[str, str]
) -> dict[str, str]:
    """Of the format's own fields, and of `fields` at their places."""
    return {
        "architectures": f"`{speculator}`; vLLM goes by `speculators_model_type`",
        "speculators_model_type": f"the algorithm: `{family}`",
        "speculators_version": "of this format",
        "speculators_config.algorithm": "the algorithm again",
        "speculators_config.default_proposal_method": "`greedy`",
        "speculators_config.proposal_methods": (
            "one, with `speculative_tokens`: the drafts of a round"
        ),
        "speculators_config.verifier.name_or_path": "the target that vLLM loads",
        "speculators_config.verifier.architectures": "the target's architecture, for people",
        **{
            name if name in top or name.startswith(COMMON) else f"{LAYER}.{name}": meaning
            for name, meaning in fields.items()
            if name != "architectures"
        },
    }


class _Speculators:
    """The fields of vLLM's own format at their places here, and back."""

    format = "speculators"
    family: ClassVar[str]
    speculator: ClassVar[str]  # `architectures` of config.json
    version: ClassVar[str] = "0.9.0"  # of the format that the fields are in
    top: ClassVar[tuple[str, ...]]  # fields beside the layer's

    def recognises(self, fields: Mapping[str, Any], names: set[str]) -> bool:
        return fields.get("speculators_model_type") == self.family

    def flat(self, fields: dict[str, Any]) -> dict[str, Any]:
        """The fields of vLLM's own format -> this format's, those of the layer among them."""
        return fields

    def native(self, fields: dict[str, Any], where: str) -> dict[str, Any]:
        """The inverse of `flat`."""
        return fields

    def drafts(self, fields: Mapping[str, Any]) -> int:
        """Of a round, where nobody says how many."""
        return NUM_SPECULATIVE_TOKENS

    def dressed(self, fields: dict[str, Any]) -> dict[str, Any]:
        own = fields["draftsmith"]
        target = own.get("target") or {}
        if not target.get("name_or_path"):
            raise ConfigError(
                "export format speculators: config.json names the target there, and this drafter"
                " does not know its own; name it (draftsmith export --model TARGET)"
            )
        flat = self.flat(fields)
        outer = {name: flat[name] for name in (*self.top, "dtype", "tie_word_embeddings")}
        tokens = own.get("num_speculative_tokens") or self.drafts(flat)
        method = {"proposal_type": "greedy", "speculative_tokens": tokens, "verifier_accept_k": 1}
        return {
            "architectures": [self.speculator],
            "speculators_model_type": self.family,
            "speculators_version": self.version,
            **outer,
            LAYER: {
                k: v for k, v in flat.items() if k not in (*outer, "architectures", "draftsmith")
            },
            "speculators_config": {
                "algorithm": self.family,
                "default_proposal_method": "greedy",
                "proposal_methods": [method | {"accept_tolerance": 0.0}],
                "verifier": {"architectures": [], **target},
            },
            "draftsmith": own,
        }

    def plain(self, fields: Mapping[str, Any], where: str) -> Mapping[str, Any]:
        kind, layer = fields.get("speculators_model_type"), fields.get(LAYER)
        if kind != self.family:
            raise CheckpointError(
                f"{where}: speculators_model_type is {kind!r}; of this format {', '.join(TYPES)}"
                " are read"
            )
        if not isinstance(layer, Mapping):
            raise CheckpointError(f"{where}: {LAYER} is missing; it holds the fields of the layer")
        outer = {
            name: fields[name] for name in (*self.top, *COMMON) if fields.get(name) is not None
        }
        return self.native({**layer, **outer}, where)


class SpeculatorsEagle3Layout(_Speculators, Eagle3Layout):
    """EAGLE-3."""

    speculator, version, top = "Eagle3Speculator", "0.4.0", TOP
    meanings: ClassVar = _meanings("eagle3", speculator, top, MEANINGS)

    def recognises(self, fields: Mapping[str, Any], names: set[str]) -> bool:
        """Algorithms that are not known as well, so that `plain` names them."""
        return "speculators_model_type" in fields or "speculators_config" in fields

    def native(self, fields: dict[str, Any], where: str) -> dict[str, Any]:
        # without a word vLLM takes the normed state for the residual here, and the other one in its
        # own format
        return {"norm_before_residual": True, **fields, "architectures": [_native(fields, where)]}


class SpeculatorsPEagleLayout(_Speculators, PEagleLayout):
    """P-EAGLE. vLLM does not pass on the switches of EAGLE-3.1."""

    speculator, top = "PEagleSpeculator", (*TOP, "mask_token_id", "num_depths")
    meanings: ClassVar = _meanings("peagle", speculator, top, PEagleLayout.meanings)

    def check(self, config: Any) -> None:
        super().check(config)
        if lost := [name for name in ("fc_norm", "norm_output") if getattr(config, name)]:
            raise ConfigError(
                f"export format speculators: vLLM does not read {', '.join(lost)} of a peagle"
                " drafter there and would draft something else; write it in vLLM's own format"
                " (--format vllm), or train without"
            )

    def drafts(self, fields: Mapping[str, Any]) -> int:
        return fields["num_depths"]

    def plain(self, fields: Mapping[str, Any], where: str) -> Mapping[str, Any]:
        """The drafts of a round are the depths trained, where no other number is said."""
        methods = (fields.get("speculators_config") or {}).get("proposal_methods") or [{}]
        return {
            "num_depths": methods[0].get("speculative_tokens") or 8,
            **super().plain(fields, where),
        }

    def native(self, fields: dict[str, Any], where: str) -> dict[str, Any]:
        return {**fields, "architectures": [_native(fields, where)]}


class _Block(_Speculators):
    """Block drafters: all of their fields at the top, but those of the layers."""

    top: ClassVar[tuple[str, ...]] = (
        "draft_vocab_size",
        "target_hidden_size",
        TAPS,
        "mask_token_id",
        "block_size",
        ANCHOR,
        NON_CAUSAL,
    )
    architecture: ClassVar[str]

    def flat(self, fields: dict[str, Any]) -> dict[str, Any]:
        flat: dict[str, Any] = {ANCHOR: False, **fields, **fields[SECTION]}
        flat |= {TAPS: [i + 1 for i in flat["target_layer_ids"]], NON_CAUSAL: not flat["is_causal"]}
        gone = (SECTION, "target_layer_ids", "is_causal", "causal", "num_target_layers")
        return {name: value for name, value in flat.items() if name not in gone}

    def native(self, fields: dict[str, Any], where: str) -> dict[str, Any]:
        causal = self.causal(fields)
        ids = {} if TAPS not in fields else {"target_layer_ids": [i - 1 for i in fields.pop(TAPS)]}
        said = {
            "is_causal": causal,
            SECTION: {"causal": causal},
            "architectures": [self.architecture],
        }
        return {ANCHOR: False, **fields, **ids, **said}

    def causal(self, fields: Mapping[str, Any]) -> bool:
        """As vLLM has it: of all layers, not of sliding ones alone as the name says."""
        return not fields.get(NON_CAUSAL, True)

    def drafts(self, fields: Mapping[str, Any]) -> int:
        return fields["block_size"] - (not fields[ANCHOR])


def _block_meanings(
    layout: type[DFlashLayout], speculator: str, top: tuple[str, ...]
) -> dict[str, str]:
    gone = ("target_layer_ids", "is_causal", "causal", "num_target_layers")
    flat = {name.removeprefix(f"{SECTION}."): meaning for name, meaning in layout.meanings.items()}
    flat["block_size"] = layout.meanings["block_size"]
    flat |= {
        TAPS: "taps: i is the output of layer i - 1, as ours",
        ANCHOR: layout.meanings.get(ANCHOR, "false") + "; vLLM takes false where nothing is said",
        NON_CAUSAL: "not `is_causal`, of full layers too; true where nothing is said",
    }
    return _meanings(
        layout.family, speculator, top, {k: v for k, v in flat.items() if k not in gone}
    )


class SpeculatorsDFlashLayout(_Block, DFlashLayout):
    """DFlash."""

    speculator = "DFlashSpeculator"
    meanings: ClassVar = _block_meanings(DFlashLayout, speculator, _Block.top)


class SpeculatorsDFlash2Layout(_Block, DFlash2Layout):
    """DFlash 2."""

    speculator, top = "DFlash2Speculator", (*_Block.top, *DFlash2Layout.own)
    meanings: ClassVar = _block_meanings(DFlash2Layout, speculator, top)


class SpeculatorsDSparkLayout(_Block, DSparkLayout):
    """DSpark. vLLM reads no causality here: sliding layers are causal, and full ones are not."""

    speculator, top = (
        "DSparkSpeculator",
        (*_Block.top, *(name for name in DSparkLayout.own if name != ANCHOR)),
    )
    meanings: ClassVar = _block_meanings(DSparkLayout, speculator, top) | {
        NON_CAUSAL: (
            "true without a window; vLLM goes by `layer_types`, where sliding layers are causal"
        )
    }

    def check(self, config: Any) -> None:
        super().check(config)
        if config.is_causal != (config.sliding_window is not None):
            raise ConfigError(
                f"export format speculators: is_causal {config.is_causal} with sliding_window"
                f" {config.sliding_window}: of a dspark drafter there sliding layers are causal and"
                " full ones are not; write it in vLLM's own format (--format vllm)"
            )
        if config.markov_head_type != "vanilla":
            raise ConfigError(
                f"export format speculators: markov_head_type {config.markov_head_type}: vLLM,"
                " which reads this format, runs vanilla alone; SGLang runs it (--format sglang)"
            )

    def causal(self, fields: Mapping[str, Any]) -> bool:
        return SLIDING in (fields.get("layer_types") or ())


def _native(fields: Mapping[str, Any], where: str) -> str:
    """The architecture in vLLM's own format of an EAGLE-3 head."""
    model_type = fields.get("model_type", "llama")
    if model_type not in NATIVE:
        raise CheckpointError(
            f"{where}: {LAYER}.model_type is {model_type!r}; expected {' or '.join(NATIVE)}"
        )
    return NATIVE[model_type]
