"""SGLang's layouts where they differ from vLLM's: tap numbers, names, architectures.

By SGLang's own loaders: it numbers taps by layer outputs, one less than ours, and ignores what it
does not know, which is refused here. Versions that do not read `num_aux_hidden_states` refuse
another number of taps than three."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from typing_extensions import override

from draftsmith.speculators.errors import CheckpointError, ConfigError
from draftsmith.speculators.export.layouts.base import Fault, Fields
from draftsmith.speculators.export.layouts.eagle import EagleLayout
from draftsmith.speculators.export.layouts.eagle3 import SECTION, TAPS, Eagle3Layout

EAGLE = "LlamaForCausalLMEagle"


class SGLangEagle3Layout(Eagle3Layout):
    """EAGLE-3 as SGLang reads it."""

    taps_in_section = True

    @override
    def check(self, config: Any, format_: str) -> None:
        switches = ("norm_before_residual", "qk_norm", "sliding_window")
        unknown = [name for name in switches if getattr(config, name)]
        if config.own_embeddings and config.hidden_size == config.target_hidden_size:
            unknown.append("own_embeddings")  # replaced by the target's
        _refuse(unknown, "eagle3")
        if {0, config.num_target_layers} & set(config.tap_layers):
            raise ConfigError(
                f"tap_layers {list(config.tap_layers)}: SGLang taps the"
                f" outputs of layers 1 to {config.num_target_layers - 1}; serve it with vLLM",
                where="export format sglang",
            )

    @override
    def sglang_note(self, config: Any) -> str:
        first = "0.5.18" if config.norm_before_fc else "0.5.12"
        newer = config.norm_before_fc or config.fc_norm or config.norm_output
        if newer or config.num_layers > 1:
            return f"it needs SGLang {first} or newer; older ones drop some of it without a word"
        return ""

    @override
    def no_vllm(self, config: Any) -> str:
        return "it would read every tap one layer too early"

    @override
    def no_sglang(self, config: Any) -> str:
        return ""

    @override
    def to_engine(self, fields: dict[str, Any]) -> dict[str, Any]:
        inner = {TAPS: [tap - 1 for tap in fields[TAPS]], "use_aux_hidden_state": True}
        rest = {name: value for name, value in fields.items() if name != TAPS}
        return rest | {"rope_scaling": _rope_scaling(fields), SECTION: inner}

    @override
    def from_engine(self, fields: Fields, where: str) -> Fields:
        if not (fields.get(SECTION) or {}).get(TAPS):
            raise CheckpointError(f"{SECTION}.{TAPS} is missing; it names the taps", where=where)
        return super().from_engine({**fields, TAPS: None}, where)


class SGLangEagleLayout(EagleLayout):
    """EAGLE-1 as SGLang reads it, whose fc always has a bias: random, if it were left out."""

    architectures: ClassVar[tuple[str, ...]] = (EAGLE,)

    @override
    def check(self, config: Any, format_: str) -> None:
        names = ("own_embeddings", "attention_bias")
        _refuse([name for name in names if getattr(config, name)], "eagle")

    @override
    def no_vllm(self, config: Any) -> str:
        return "it refuses the architecture"

    @override
    def no_sglang(self, config: Any) -> str:
        return ""

    @override
    def field_faults(self, fields: Fields, plain: Fields, names: set[str]) -> Iterator[Fault]:
        yield from ()  # its fc has a bias

    @override
    def zeros(self, config: Any) -> dict[str, tuple[int, ...]]:
        return {} if config.fc_bias else {"fc.bias": (config.hidden_size,)}

    @override
    def to_engine(self, fields: dict[str, Any]) -> dict[str, Any]:
        return fields | {"architectures": [EAGLE], "rope_scaling": _rope_scaling(fields)}


def _rope_scaling(fields: Fields) -> dict[str, Any] | None:
    rope = fields["rope_parameters"]
    if rope.get("rope_type", "default") == "default":
        return None
    return {name: value for name, value in rope.items() if name != "rope_theta"}


def _refuse(unknown: list[str], family: str) -> None:
    if unknown:
        raise ConfigError(
            f"SGLang runs no {family} head with {', '.join(unknown)}, and"
            " would draft something else; serve it with vLLM",
            where="export format sglang",
        )
