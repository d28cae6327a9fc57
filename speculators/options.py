"""What a recipe may say about a drafter: the base of every family's `drafter:` section.

A family's own options derive from `DrafterOptions` in its file; a field that is also a field of the family's
`DrafterConfig` shapes the head, every other one says how it is trained. Opens no file and loads no model.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

PositiveInt = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Text = Annotated[str, Field(min_length=1)]


class Section(BaseModel):
    """Base of every section: unknown keys refused, nothing coerced (true is not 1), nothing changes later."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class DrafterOptions(Section):
    """The trained head. Sizes left null are the target's own."""

    unroll_steps: PositiveInt = Field(1, description="depths trained: drafts per slot that have a term in the loss")
    step_decay: float = Field(0.8, gt=0, le=1, description="weight of depth k is step_decay**k before normalisation")
    init_from: Text | None = Field(
        None, description="exported or published head (directory or id) to start from; null: from scratch"
    )

    @property
    def start(self) -> str:
        """Without `init_from`: what training starts from, in a word or two."""
        return "scratch"

    def accept(self, head: Any) -> None:
        """Raises ConfigError where `head`, the DrafterConfig of `init_from`, needs a word that these options lack."""

    def shape(self, fields: dict[str, Any], target: Any = None) -> dict[str, Any]:
        """What these options say of `fields`, those of the family's DrafterConfig, for this target (or a sketch of
        it); None where they leave it open."""
        return {
            name: tuple(value) if isinstance(value := getattr(self, name), list) else value
            for name in type(self).model_fields
            if name in fields
        }


class DecoderOptions(DrafterOptions):
    """A head of decoder layers."""

    num_layers: PositiveInt = Field(
        1, description="decoder layers of the head; one is the published default and the cheapest to run"
    )
    intermediate_size: PositiveInt | None = Field(None, description="width of the MLP; null: the target's")
    num_attention_heads: PositiveInt | None = Field(None, description="attention heads; null: the target's")
    num_key_value_heads: PositiveInt | None = Field(None, description="key/value heads; null: the target's")
    head_dim: PositiveInt | None = Field(None, description="size of one attention head; null: the target's")

    @model_validator(mode="after")
    def _heads_divide(self) -> DecoderOptions:
        heads, kv = self.num_attention_heads, self.num_key_value_heads
        if heads and kv and heads % kv:
            raise ValueError(f"num_attention_heads ({heads}) must be a multiple of num_key_value_heads ({kv})")
        return self


class TapOptions(Section):
    """Which of the target's hidden states a head reads."""

    tap_layers: list[Count] | None = Field(
        None,
        min_length=1,
        description="target hidden states read by the head (0: embedding output, i: output of layer i); "
        "null: [2, n//2, n-3] of n layers",
    )

    @field_validator("tap_layers")
    @classmethod
    def _sorted_unique(cls, taps: list[int] | None) -> list[int] | None:
        if taps is not None and taps != sorted(set(taps)):
            raise ValueError(
                f"expected layer numbers in rising order, each once, got {taps}; write {sorted(set(taps))}"
            )
        return taps
