"""The format of vLLM's speculators library: config.json names the target, so that the folder alone is served.

The tensors are those of the native layout. The layer's fields lie below `transformer_layer_config`, the switches beside
it, and `speculators_config` says which target and how many drafts. Knows no file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from speculators.errors import CheckpointError, ConfigError
from speculators.export.layouts.base import NUM_SPECULATIVE_TOKENS
from speculators.export.layouts.eagle3 import MEANINGS, SWITCHES, Eagle3Layout

VERSION = "0.4.0"  # of the format that these fields are in
ARCHITECTURE = "Eagle3Speculator"
TOP = ("draft_vocab_size", "target_hidden_size", "eagle_aux_hidden_state_layer_ids", *SWITCHES)  # vLLM reads them here
NATIVE = {"llama": "LlamaForCausalLMEagle3", "qwen3": "Qwen3ForCausalLM"}  # model_type of the layer -> architecture
LAYER = "transformer_layer_config"
OUTSIDE = (*TOP, "architectures", "dtype", "tie_word_embeddings", "draftsmith")


class SpeculatorsEagle3Layout(Eagle3Layout):
    """EAGLE-3, the one family of ours that vLLM reads in this format."""

    format = "speculators"
    meanings: ClassVar = {
        "architectures": f"`{ARCHITECTURE}`; vLLM goes by `speculators_model_type`",
        "speculators_model_type": "the algorithm: `eagle3`",
        "speculators_version": "of this format",
        "speculators_config.algorithm": "the algorithm again",
        "speculators_config.default_proposal_method": "`greedy`",
        "speculators_config.proposal_methods": "one, with `speculative_tokens`: the drafts of a round",
        "speculators_config.verifier.name_or_path": "the target that vLLM loads",
        "speculators_config.verifier.architectures": "the target's architecture, for people",
        **{
            name if name in OUTSIDE or name.startswith("draftsmith") else f"{LAYER}.{name}": meaning
            for name, meaning in MEANINGS.items()
            if name != "architectures"
        },
    }

    def recognises(self, fields: Mapping[str, Any], names: set[str]) -> bool:
        return "speculators_model_type" in fields or "speculators_config" in fields

    def dressed(self, fields: dict[str, Any]) -> dict[str, Any]:
        own = fields["draftsmith"]
        target = own.get("target") or {}
        if not target.get("name_or_path"):
            raise ConfigError(
                "export format speculators: config.json names the target there, and this drafter does not know its "
                "own; name it (draftsmith export --model TARGET)"
            )
        drafts = own.get("num_speculative_tokens") or NUM_SPECULATIVE_TOKENS
        method = {"proposal_type": "greedy", "speculative_tokens": drafts, "verifier_accept_k": 1}
        return {
            "architectures": [ARCHITECTURE],
            "speculators_model_type": "eagle3",
            "speculators_version": VERSION,
            **{name: fields[name] for name in (*TOP, "dtype", "tie_word_embeddings")},
            LAYER: {name: value for name, value in fields.items() if name not in OUTSIDE},
            "speculators_config": {
                "algorithm": "eagle3",
                "default_proposal_method": "greedy",
                "proposal_methods": [method | {"accept_tolerance": 0.0}],
                "verifier": {"architectures": [], **target},
            },
            "draftsmith": own,
        }

    def plain(self, fields: Mapping[str, Any], where: str) -> Mapping[str, Any]:
        kind, layer = fields.get("speculators_model_type"), fields.get(LAYER)
        if kind != "eagle3":
            raise CheckpointError(f"{where}: speculators_model_type is {kind!r}; of this format eagle3 is read")
        if not isinstance(layer, Mapping):
            raise CheckpointError(f"{where}: {LAYER} is missing; it holds the fields of the layer")
        model_type = layer.get("model_type", "llama")
        if model_type not in NATIVE:
            raise CheckpointError(f"{where}: {LAYER}.model_type is {model_type!r}; expected {' or '.join(NATIVE)}")
        outer = {name: fields[name] for name in OUTSIDE if fields.get(name) is not None}
        # without a word vLLM takes the normed state for the residual here, and the other one in its own format
        return {**layer, "norm_before_residual": True, **outer, "architectures": [NATIVE[model_type]]}
