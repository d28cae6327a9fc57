"""The base classes of a recipe's `drafter:` section.

A family's options derive from `DrafterOptions` in its file. A field that the family's
`DrafterConfig` has too sets the head's shape; the others set how it is trained. Nothing here opens
a file or loads a model."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

PositiveInt = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
NonEmptyText = Annotated[str, Field(min_length=1)]
AUTO = "auto"  # a size that is measured when the training begins
VocabularySize = Annotated[int, Field(ge=2)] | Literal["auto"]


class Section(BaseModel):
    """Base of recipe sections: immutable, no unknown keys, no coercion (true is not 1). The string
    below a key is its description."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )


class DrafterOptions(Section):
    """Options of a trained head. Sizes that are null are the target's."""

    unroll_steps: PositiveInt = Field(
        1, description="depths trained: drafts per slot that have a term in the loss"
    )
    init_from: NonEmptyText | None = Field(
        None, description="exported or published head (directory or id) to start from; null: none"
    )

    @classmethod
    def all_depths(cls, section: dict[str, Any]) -> Any:
        """The depths trained where a recipe with this `section` names none; None: the default."""
        return None

    @model_validator(mode="before")
    @classmethod
    def _depths(cls, value: Any) -> Any:
        if not isinstance(value, dict) or value.get("unroll_steps") is not None:
            return value
        depths = cls.all_depths(value)
        return {**value, "unroll_steps": depths} if isinstance(depths, int) else value

    @property
    def start(self) -> str:
        """A short name of the starting weights where `init_from` is null."""
        init = getattr(self, "init", None)  # an option of some families
        return "scratch" if init is None else f"init: {init}"

    def shape(self, fields: dict[str, Any], target: Any = None) -> dict[str, Any]:
        """The values that these options set for `fields`, those of the family's DrafterConfig; None
        where an option is null. `target`: the target, loaded or without weights."""
        values: dict[str, Any] = {}
        for name in type(self).model_fields:
            if name in fields:
                value = getattr(self, name)
                values[name] = tuple(value) if isinstance(value, list) else value
        return values


class VocabularyOptions(DrafterOptions):
    """Options of a head that scores the whole vocabulary unless a recipe reduces it."""

    draft_vocab_size: VocabularySize | None = Field(
        None,
        description="reduced vocabulary, the tokens supervised most often; auto: as measured to be"
        " fastest; null: the target's",
    )

    def shape(self, fields: dict[str, Any], target: Any = None) -> dict[str, Any]:
        """See `DrafterOptions.shape`."""
        shape = super().shape(fields, target)
        if target is not None and shape["draft_vocab_size"] is None:
            shape["draft_vocab_size"] = target.vocab_size
        return shape


class DecoderOptions(DrafterOptions):
    """Options of a head made of decoder layers."""

    num_layers: PositiveInt = Field(
        1, description="decoder layers of the head; one is the published default"
    )
    intermediate_size: PositiveInt | None = Field(
        None, description="width of the MLP; null: the target's"
    )
    num_attention_heads: PositiveInt | None = Field(
        None, description="attention heads; null: the target's"
    )
    num_key_value_heads: PositiveInt | None = Field(
        None, description="key/value heads; null: the target's"
    )
    head_dim: PositiveInt | None = Field(
        None, description="size of one attention head; null: the target's"
    )
    sliding_window: PositiveInt | None = Field(
        None, description="positions that a slot reads, its own included; null: all"
    )


class TapOptions(Section):
    """Options of a head that reads hidden states of the target."""

    tap_layers: list[Count] | None = Field(
        None,
        min_length=1,
        description="states read (0: embedding, i: output of layer i); null: [2, n//2, n-3]",
    )
