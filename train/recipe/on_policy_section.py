"""The `on_policy:` section of a recipe or a stage: which steps learn from text the drafter had a part in, and how."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from speculators.errors import ConfigError
from speculators.options import PositiveInt, Section, Share
from train.losses.divergences import ON_LABELS, Mix
from train.recipe.data_sections import Shares


class ShareSchedule(Section):
    """A share that goes from one value to another in a straight line over a stage's budget."""

    start: Share = Field(description="at the beginning of the stage")
    end: Share = Field(description="at its end")

    def at(self, done: float) -> float:
        """The share when `done` of the budget, 0 to 1, is spent."""
        return self.start + (self.end - self.start) * min(done, 1.0)


class OnPolicySection(Section):
    """Texts that the drafter in training had a part in, in place of part of the data."""

    share: ShareSchedule = Field(
        default_factory=lambda: ShareSchedule(start=1.0, end=1.0),
        description="probability that a micro-step learns from rollouts instead of data: a number, or {start: 0.0, "
        "end: 1.0} for a straight line over the stage; 0 is training as without this section",
    )
    written_by: Literal["target", "drafter"] | None = Field(
        None,
        description="target: by speculative decoding with the drafter in training, so that the text is the target's "
        "and the rejected drafts are known; drafter: by a draft model alone (DistillSpec's on-policy data); null: "
        "drafter for a draft model, target for heads, which cannot write",
    )
    temperatures: Shares | None = Field(
        None,
        min_length=1,
        description="of the texts, written as in regenerate; null: those of regenerate, which are serving's, and "
        "whose top_p and top_k hold here too",
    )
    max_new_tokens: PositiveInt = Field(256, description="longest response of a rollout, within data.max_length")
    prompts: PositiveInt = Field(
        64, description="texts written at a refresh, by all processes together; prompts are those of data.train"
    )
    refresh_every: PositiveInt = Field(
        50, description="steps after which texts are written anew by the drafter as it is then, if a step needs any"
    )
    num_speculative_tokens: PositiveInt | None = Field(
        None, description="tokens drafted per verification of a rollout; null: the evaluation's"
    )
    suffix_loss: dict[str, Any] = Field(
        default_factory=lambda: {"reverse_kl": 1.0},
        description="divergences, as in loss, of what was drafted after a rejected token; none that reads the data's "
        "token, as there is none",
    )
    suffix_weight: float = Field(
        0.1,
        ge=0,
        description="weight of that loss beside the recipe's own, most of the gradient at 0.5; 0 leaves it out",
    )
    suffix_decay: float = Field(
        0.8, gt=0, le=1, description="weight of the j-th depth that follows a rejected token is suffix_decay**j"
    )

    @field_validator("share", mode="before")
    @classmethod
    def _constant(cls, value: Any) -> Any:
        if isinstance(value, dict | ShareSchedule):
            return value
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            raise ValueError(f"expected a number from 0 to 1, or {{start: ..., end: ...}} of such, got {value!r}")
        return {"start": float(value), "end": float(value)}

    @field_validator("suffix_loss")
    @classmethod
    def _weights_are_floats(cls, loss: dict[str, Any]) -> dict[str, Any]:
        return {name: float(term) if type(term) is int else term for name, term in loss.items()}

    @model_validator(mode="after")
    def _suffix_has_no_data(self) -> OnPolicySection:
        try:
            Mix.parse(self.suffix_loss, "suffix_loss")
        except ConfigError as error:
            raise ValueError(str(error)) from None
        if wrong := sorted(ON_LABELS & set(self.suffix_loss)):
            raise ValueError(
                f"suffix_loss.{wrong[0]}: reads the token of the data, and after a rejected draft there is none; use a "
                "divergence of distributions, such as reverse_kl or tv"
            )
        return self
