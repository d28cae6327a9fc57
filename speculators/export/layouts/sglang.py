"""SGLang's layouts: the same tensors as vLLM's under SGLang's names, tap numbers and architectures.

SGLang numbers taps by layer outputs, one less than ours; it has no switch for some variants and
ignores what it does not know, so that these are refused here. From reading SGLang's own loaders,
whose engine needs a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from speculators.errors import CheckpointError, ConfigError
from speculators.export.layouts.base import Table
from speculators.export.layouts.eagle import EagleLayout
from speculators.export.layouts.eagle3 import MEANINGS as EAGLE3_MEANINGS
from speculators.export.layouts.eagle3 import SECTION, TAPS, Eagle3Layout
from speculators.export.layouts.mtp import MtpLayout

EAGLE3, EAGLE = "LlamaForCausalLMEagle3", "LlamaForCausalLMEagle"


class SGLangEagle3Layout(Eagle3Layout):
    """EAGLE-3. Layers after the first have their input norm under the name `hidden_norm`."""

    format = "sglang"
    meanings: ClassVar = {
        **{name: meaning for name, meaning in EAGLE3_MEANINGS.items() if name != TAPS},
        "architectures": f"`{EAGLE3}`",
        f"{SECTION}.{TAPS}": "tap i is the output of layer i: one less than ours and vLLM's",
        f"{SECTION}.use_aux_hidden_state": "true",
        "rope_scaling": "`rope_parameters` again, for versions that do not read them; null: none",
    }

    def check(self, config: Any) -> None:
        switches = ("norm_before_fc", "norm_before_residual", "qk_norm", "sliding_window")
        unknown = [name for name in switches if getattr(config, name)]
        if config.own_embeddings and config.hidden_size == config.target_hidden_size:
            unknown.append("own_embeddings")  # replaced by the target's
        _refuse(unknown, "eagle3")
        if {0, config.num_target_layers} & set(config.tap_layers):
            raise ConfigError(
                f"export format sglang: tap_layers {list(config.tap_layers)}: SGLang taps the"
                f" outputs of layers 1 to {config.num_target_layers - 1}, neither the embedding (0)"
                f" nor the last layer ({config.num_target_layers}); serve this head with vLLM"
            )

    def tensors(self, config: Any) -> Table:
        return {_renamed(name): row for name, row in super().tensors(config).items()}

    def canonical(self, found: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
        return {_renamed(name): tensor for name, tensor in super().canonical(found, config).items()}

    def dressed(self, fields: dict[str, Any]) -> dict[str, Any]:
        inner = {TAPS: [tap - 1 for tap in fields[TAPS]], "use_aux_hidden_state": True}
        rest = {name: value for name, value in fields.items() if name != TAPS}
        return rest | {"rope_scaling": _rope_scaling(fields), SECTION: inner}

    def plain(self, fields: Mapping[str, Any], where: str) -> Mapping[str, Any]:
        if not (fields.get(SECTION) or {}).get(TAPS):
            raise CheckpointError(
                f"{where}: {SECTION}.{TAPS} is missing; it says which layers of the target are read"
            )
        return super().plain({**fields, TAPS: None}, where)


class SGLangEagleLayout(EagleLayout):
    """EAGLE-1. SGLang's fc always has a bias, which would be random if it were left out."""

    format = "sglang"
    meanings: ClassVar = {
        **EagleLayout.meanings,
        "architectures": f"`{EAGLE}`, which vLLM refuses",
        "rope_scaling": "`rope_parameters` again, for versions that do not read them; null: none",
    }

    def check(self, config: Any) -> None:
        _refuse(
            [name for name in ("own_embeddings", "attention_bias") if getattr(config, name)],
            "eagle",
        )

    def zeros(self, config: Any) -> dict[str, tuple[int, ...]]:
        return {} if config.fc_bias else {"fc.bias": (config.hidden_size,)}

    def dressed(self, fields: dict[str, Any]) -> dict[str, Any]:
        return fields | {"architectures": [EAGLE], "rope_scaling": _rope_scaling(fields)}


class SGLangMtpLayout(MtpLayout):
    """Multi-token prediction: nothing differs."""

    format = "sglang"


def _renamed(name: str) -> str:
    later = name.startswith("layers.") and not name.startswith("layers.0.")
    return name.replace(".input_layernorm.", ".hidden_norm.") if later else name


def _rope_scaling(fields: Mapping[str, Any]) -> dict[str, Any] | None:
    rope = fields["rope_parameters"]
    if rope.get("rope_type", "default") == "default":
        return None
    return {name: value for name, value in rope.items() if name != "rope_theta"}


def _refuse(unknown: list[str], family: str) -> None:
    if unknown:
        raise ConfigError(
            f"export format sglang: SGLang runs no {family} head with {', '.join(unknown)}; it"
            " would load this one without a word and draft something else. Serve it with vLLM, or"
            " train without"
        )
