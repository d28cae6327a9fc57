"""DrafterConfig: everything needed to rebuild a drafter with no recipe at hand.

Saved beside the weights in training; exports translate it to and from the fields of each format (speculators/export).
Knows nothing of training options (learning rates, unroll steps, losses).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from speculators.errors import ConfigError
from speculators.target import FrozenTarget

CONFIG_FILE = "drafter_config.json"


def default_tap_layers(num_layers: int) -> list[int]:
    """EAGLE-3's taps [2, n/2, n-3] in `hidden_states` numbering, kept distinct and in range for shallow targets."""
    taps = sorted({min(2, num_layers), num_layers // 2, max(num_layers - 3, 0)})
    candidates = [i for i in range(num_layers, -1, -1) if i not in taps]
    while len(taps) < 3 and candidates:
        taps.append(candidates.pop(0))
    return sorted(taps)


class DrafterConfig(BaseModel):
    """Shape and switches of a trained head. Field names are those of transformers and vLLM where they exist."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    family: str
    vocab_size: int = Field(ge=1, description="the target's vocabulary")
    draft_vocab_size: int = Field(ge=1, description="tokens the head can propose; vocab_size = all")
    hidden_size: int = Field(ge=1)
    target_hidden_size: int = Field(ge=1)
    num_target_layers: int = Field(ge=1)
    tap_layers: tuple[int, ...] = Field(description="hidden_states[i] of the target, ascending; 0 = embedding output")
    num_layers: int = Field(1, ge=1)
    intermediate_size: int = Field(ge=1)
    num_attention_heads: int = Field(ge=1)
    num_key_value_heads: int = Field(ge=1)
    head_dim: int = Field(ge=2)
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    rope_parameters: dict[str, Any] = Field(description="transformers' rope_parameters: rope_type, rope_theta, scaling")
    max_position_embeddings: int = Field(ge=1)
    qk_norm: bool = Field(False, description="normalise queries and keys per head (the Qwen3 layer)")
    norm_before_fc: bool = Field(False, description="EAGLE-3.1: RMS norm over the concatenated taps")
    fc_norm: bool = Field(False, description="EAGLE-3.1: an RMS norm per tap")
    norm_output: bool = Field(False, description="EAGLE-3.1: feed the normed state back")
    norm_before_residual: bool = Field(False, description="the residual is the normed state")
    own_embeddings: bool = Field(False, description="the head carries its own embedding table")
    dtype: str = Field("float32", description="dtype of the exported weights")

    @model_validator(mode="after")
    def _consistent(self) -> DrafterConfig:
        if self.draft_vocab_size > self.vocab_size:
            raise ValueError(f"draft_vocab_size {self.draft_vocab_size} is larger than vocab_size {self.vocab_size}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )
        if list(self.tap_layers) != sorted(set(self.tap_layers)):
            raise ValueError(f"tap_layers {list(self.tap_layers)} must be ascending and distinct")
        if self.tap_layers and self.tap_layers[-1] > self.num_target_layers:
            raise ValueError(f"tap_layers {list(self.tap_layers)}: the target has layers 0..{self.num_target_layers}")
        if self.hidden_size != self.target_hidden_size and not self.own_embeddings:
            raise ValueError(
                f"hidden_size {self.hidden_size} differs from the target's {self.target_hidden_size}, so the target's "
                "embedding cannot be shared; set own_embeddings"
            )
        if self.norm_before_fc and self.fc_norm:
            raise ValueError("norm_before_fc and fc_norm exclude one another")
        return self

    @property
    def reduced_vocabulary(self) -> bool:
        return self.draft_vocab_size < self.vocab_size

    def save(self, folder: Path) -> None:
        (folder / CONFIG_FILE).write_text(self.model_dump_json(indent=2) + "\n")

    @classmethod
    def load(cls, folder: Path) -> DrafterConfig:
        return build_config(
            str(folder / CONFIG_FILE), **cls.model_validate_json((folder / CONFIG_FILE).read_text()).model_dump()
        )


def build_config(where: str, **fields: Any) -> DrafterConfig:
    """A DrafterConfig, or a ConfigError that names `where` and every field that is wrong."""
    try:
        return DrafterConfig(**fields)
    except ValidationError as error:
        lines = [f"{'.'.join(str(p) for p in e['loc']) or 'drafter'}: {e['msg']}" for e in error.errors()]
        raise ConfigError(f"{where}: " + "; ".join(lines)) from error


def config_for_target(
    target: FrozenTarget, family: str, *, tap_layers: Sequence[int] | None = None, **overrides: Any
) -> DrafterConfig:
    """The default drafter of `family` for a target: sizes, rope, eps are the target's; `overrides` win."""
    c = target.config
    heads = c.num_attention_heads
    kv_heads = getattr(c, "num_key_value_heads", None) or heads
    fields: dict[str, Any] = dict(
        family=family,
        vocab_size=target.vocab_size,
        draft_vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        target_hidden_size=target.hidden_size,
        num_target_layers=target.num_layers,
        tap_layers=tuple(sorted(tap_layers if tap_layers is not None else default_tap_layers(target.num_layers))),
        intermediate_size=c.intermediate_size,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=getattr(c, "head_dim", None) or c.hidden_size // heads,
        rms_norm_eps=getattr(c, "rms_norm_eps", None) or 1e-6,
        rope_parameters=_rope_of(c),
        max_position_embeddings=c.max_position_embeddings,
    )
    fields.update({k: v for k, v in overrides.items() if v is not None})
    return build_config(f"drafter for {target.name_or_path}", **fields)


def _rope_of(config: Any) -> dict[str, Any]:
    """The target's rotary parameters (of its full-attention layers if kinds differ), for the whole head dimension."""
    rope = dict(getattr(config, "rope_parameters", None) or {})
    if "full_attention" in rope:  # one set per kind of layer
        rope = dict(rope["full_attention"])
    rope.setdefault("rope_type", "default")
    rope.setdefault("rope_theta", getattr(config, "rope_theta", None) or 10000.0)
    rope.pop("partial_rotary_factor", None)  # the head rotates all of its dimensions, whatever the target does
    return rope
