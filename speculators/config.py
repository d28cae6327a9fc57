"""The configuration of a trained drafter: everything that rebuilds its module without the recipe.

`DrafterConfig` has the fields of every family, `DecoderConfig` those of heads made of decoder
layers; a family adds its own in its file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator
from typing_extensions import override

from draftsmith.speculators.errors import ConfigError

# What transformers' configs call a size, where its attribute_map has no common name for it.
MLP_WIDTHS = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")
CONTEXTS = ("max_position_embeddings", "max_seq_len", "seq_length")
UNBOUNDED = 2**17  # positions of a head whose target has no limit (ALiBi, recurrent layers)
FACTORS = ("short_factor", "long_factor")  # LongRoPE's, one for each pair of turned dimensions


def default_tap_layers(num_layers: int) -> list[int]:
    """EAGLE-3's taps [2, n/2, n-3] in `hidden_states` numbering, distinct in any target."""
    taps = sorted({min(2, num_layers), num_layers // 2, max(num_layers - 3, 0)})
    candidates = [i for i in range(num_layers, -1, -1) if i not in taps]
    while len(taps) < 3 and candidates:
        taps.append(candidates.pop(0))
    return sorted(taps)


class TargetShape(Protocol):
    """The target's sizes, from which a drafter's config is derived."""

    @property
    def name_or_path(self) -> str:
        """Its folder, or its repository id."""
        ...

    @property
    def config(self) -> Any:
        """The transformers config of its text model."""
        ...

    @property
    def vocab_size(self) -> int:
        """V, the rows of its output head."""
        ...

    @property
    def hidden_size(self) -> int:
        """H, of its residual stream."""
        ...

    @property
    def num_layers(self) -> int:
        """Its decoder layers."""
        ...


class DrafterConfig(BaseModel):
    """The sizes and switches of a trained head, under the names of transformers and vLLM."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    family: str
    vocab_size: int = Field(ge=1, description="the target's vocabulary")
    draft_vocab_size: int = Field(ge=1, description="tokens the head can propose; vocab_size = all")
    hidden_size: int = Field(ge=1)
    target_hidden_size: int = Field(ge=1)
    num_target_layers: int = Field(ge=1)
    tap_layers: tuple[int, ...] = Field(
        (), description="hidden_states[i] of the target, ascending; 0 = embeddings"
    )
    own_embeddings: bool = Field(False, description="the head has an embedding table of its own")
    dtype: str = Field("float32", description="dtype of the exported weights")
    quantization: Literal["int8"] | None = Field(
        None, description="of the linear layers' weights; None: as all others"
    )

    @model_validator(mode="after")
    def _vocabulary_and_taps(self) -> Self:
        if self.draft_vocab_size > self.vocab_size:
            raise ValueError(f"draft_vocab_size {self.draft_vocab_size} > {self.vocab_size}")
        if list(self.tap_layers) != sorted(set(self.tap_layers)):
            raise ValueError(f"tap_layers {list(self.tap_layers)} must be ascending and distinct")
        if self.tap_layers and self.tap_layers[-1] > self.num_target_layers:
            last = self.num_target_layers
            raise ValueError(f"tap_layers {list(self.tap_layers)}: the target has layers 0..{last}")
        return self

    @property
    def reduced_vocabulary(self) -> bool:
        """True if the head can propose a part of the target's vocabulary only."""
        return self.draft_vocab_size < self.vocab_size

    @property
    def max_drafts(self) -> int | None:
        """Most tokens that it was made to draft in a round; None: any number."""
        return None

    @property
    def usual_drafts(self) -> int | None:
        """Tokens of a round where nobody asks for a number; None: as many as are usual."""
        return self.max_drafts

    @classmethod
    def for_target(cls, target: TargetShape, family: str) -> dict[str, Any]:
        """Default fields, taken from the target."""
        return dict(
            family=family,
            vocab_size=target.vocab_size,
            draft_vocab_size=target.vocab_size,
            hidden_size=target.hidden_size,
            target_hidden_size=target.hidden_size,
            num_target_layers=target.num_layers,
        )

    @classmethod
    def completed(cls, fields: dict[str, Any]) -> dict[str, Any]:
        """The fields with those that follow from others where they are None."""
        return fields

    def describe(self) -> str:
        """A short description of the head's sizes, for logs and tables."""
        return f"{self.hidden_size} wide"


class DecoderConfig(DrafterConfig):
    """The configuration of a head made of Llama decoder layers."""

    num_layers: int = Field(1, ge=1)
    intermediate_size: int = Field(ge=1)
    num_attention_heads: int = Field(ge=1)
    num_key_value_heads: int = Field(ge=1)
    head_dim: int = Field(ge=2)
    hidden_act: str = "silu"
    rms_norm_eps: float = Field(1e-6, gt=0, allow_inf_nan=False)
    rope_parameters: dict[str, Any] = Field(
        description="transformers' rope_parameters: rope_type, rope_theta, scaling"
    )
    max_position_embeddings: int = Field(ge=1)
    qk_norm: bool = Field(False, description="norm queries and keys per head (Qwen3)")
    attention_bias: bool = Field(False, description="queries, keys, values have a bias (Qwen2)")
    sliding_window: int | None = Field(
        None, ge=1, description="positions that a slot reads, its own included"
    )

    @model_validator(mode="after")
    def _shapes(self) -> Self:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError("num_attention_heads is not a multiple of num_key_value_heads")
        if (turned := self.rope_parameters.get("partial_rotary_factor") or 1) != 1:
            raise ValueError(
                f"rope_parameters: partial_rotary_factor {turned:g}: our layers rotate every"
                " dimension, so that such a head would draft other tokens"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd: positions turn pairs of dimensions")
        for name in FACTORS:
            factors = self.rope_parameters.get(name)
            if factors is not None and len(factors) != self.head_dim // 2:
                raise ValueError(
                    f"rope_parameters: {len(factors)} numbers of {name} for a head_dim of"
                    f" {self.head_dim}, which has {self.head_dim // 2} pairs of dimensions"
                )
        if self.hidden_size != self.target_hidden_size and not self.own_embeddings:
            raise ValueError(
                f"hidden_size {self.hidden_size} differs from the target's"
                f" {self.target_hidden_size}, whose embedding is shared; set own_embeddings"
            )
        return self

    @override
    @classmethod
    def for_target(cls, target: TargetShape, family: str) -> dict[str, Any]:
        c = target.config
        heads = getattr(c, "num_attention_heads", None)
        fields = super().for_target(target, family) | dict(
            intermediate_size=_first(c, MLP_WIDTHS) or 4 * target.hidden_size,
            num_attention_heads=heads,
            num_key_value_heads=getattr(c, "num_key_value_heads", None),
            head_dim=getattr(c, "head_dim", None),
            rms_norm_eps=getattr(c, "rms_norm_eps", None) or 1e-6,
            rope_parameters=rope_of(c),
            max_position_embeddings=_first(c, CONTEXTS) or UNBOUNDED,
        )
        return fields if heads is None else cls.completed(fields)

    @override
    @classmethod
    def completed(cls, fields: dict[str, Any]) -> dict[str, Any]:
        if (heads := fields["num_attention_heads"]) is None:
            raise ConfigError(
                "the target has no attention whose sizes the head could take; set"
                f" drafter.num_attention_heads, such as {max(fields['hidden_size'] // 64, 1)},"
                " or use a family without attention, such as mlp",
                where="drafter.num_attention_heads",
            )
        head_dim = fields["head_dim"] or fields["hidden_size"] // heads
        return fields | dict(
            num_key_value_heads=fields["num_key_value_heads"] or heads,
            head_dim=head_dim,
            rope_parameters=with_factors_for(fields["rope_parameters"], head_dim),
        )

    @override
    def describe(self) -> str:
        heads = f"{self.num_attention_heads} heads of {self.head_dim}"
        window = f", window {self.sliding_window}" if self.sliding_window else ""
        return (
            f"{self.num_layers} x {self.hidden_size}, MLP {self.intermediate_size}, {heads}"
            f" ({self.num_key_value_heads} key/value){window}"
        )

    def llama_fields(self) -> dict[str, Any]:
        """The fields of a Llama config.json that describe the layers."""
        names = ["hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"]
        names += ["head_dim", "hidden_act", "rms_norm_eps", "rope_parameters"]
        return {
            **{name: getattr(self, name) for name in names},
            "num_hidden_layers": self.num_layers,
            "rope_theta": self.rope_parameters["rope_theta"],
            "max_position_embeddings": self.max_position_embeddings,
        }


def decoder_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """DecoderConfig fields of a Llama config.json; transformers' defaults if missing."""
    heads = fields["num_attention_heads"]
    width = fields["hidden_size"]
    return dict(
        hidden_size=width,
        num_layers=fields.get("num_hidden_layers", 1),
        intermediate_size=fields["intermediate_size"],
        num_attention_heads=heads,
        num_key_value_heads=fields.get("num_key_value_heads") or heads,
        head_dim=fields.get("head_dim") or width // heads,
        hidden_act=fields.get("hidden_act", "silu"),
        rms_norm_eps=fields.get("rms_norm_eps", 1e-6),
        rope_parameters=_rope_fields(fields),
        max_position_embeddings=fields.get("max_position_embeddings", 2048),
    )


def _rope_fields(fields: Mapping[str, Any]) -> Any:
    """`rope_parameters` of a Llama config.json, whose older names are `rope_scaling` and fields
    beside it. What is no mapping is returned as it is, for DecoderConfig to refuse by name."""
    rope = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        return rope
    rope = dict(rope)
    rope.setdefault("rope_type", rope.pop("type", "default"))
    if rope["rope_type"] == "mrope":  # of text all of its dimensions are the same
        rope["rope_type"] = "default"
    rope.setdefault("rope_theta", fields.get("rope_theta", 10000.0))
    if fields.get("partial_rotary_factor") is not None:
        rope.setdefault("partial_rotary_factor", fields["partial_rotary_factor"])
    return rope


def rope_of(config: Any) -> dict[str, Any]:
    """The target's rotary parameters as a plain head turns by them: of full attention where layer
    types differ. Those of M-RoPE turn by the positions of text, where all of its dimensions are the
    same. The two scales of latent attention (`mscale`) are left out, as engines read them of such
    targets only; YaRN then scales by 0.1 ln(factor) + 1 everywhere."""
    rope = dict(getattr(config, "rope_parameters", None) or {})
    if "full_attention" in rope:  # one set per layer type
        rope = dict(rope["full_attention"])
    rope.setdefault("rope_type", "default")
    rope.setdefault("rope_theta", getattr(config, "rope_theta", None) or 10000.0)
    original = getattr(config, "original_max_position_embeddings", None)
    if rope["rope_type"] == "longrope" and original is not None:
        rope.setdefault("original_max_position_embeddings", original)
    # a head rotates every dimension
    left_out = ["partial_rotary_factor", "mrope_section", "mrope_interleaved"]
    for field in (*left_out, "mscale", "mscale_all_dim"):
        rope.pop(field, None)
    return rope


def with_factors_for(rope: Mapping[str, Any], head_dim: int) -> dict[str, Any]:
    """`rope` with LongRoPE's factors for all head_dim / 2 pairs of a head's dimensions.

    Pair i of n turns with theta^(-i/n), so that pair i of a head and pair i·m/n of m turned ones in
    the target have one frequency, and so one factor; between two pairs it is interpolated."""
    pairs = head_dim // 2
    fitted = dict(rope)
    for name in FACTORS:
        factors = rope.get(name)
        if factors and len(factors) != pairs:
            at = [i * len(factors) / pairs for i in range(pairs)]
            fitted[name] = np.interp(at, range(len(factors)), factors).tolist()
    return fitted


def _first(config: Any, names: Sequence[str]) -> Any:
    """The first of these fields that a config has and sets; None without any."""
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if value is not None), None)
