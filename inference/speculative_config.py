"""speculative_config: how the target is drafted for, under vLLM's option names. Knows no model and loads nothing."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from inference.verification import RULES
from speculators.drafter import FAMILIES
from speculators.errors import ConfigError

TRAINING_FREE = ("ngram",)


class SpeculativeConfig(BaseModel):
    """Options of `LLM(speculative_config={...})`."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    method: str | None = Field(description="family of the drafter, ngram, or None: drafting off")
    model: str | None = Field(None, description="folder or repository id of an exported head")
    num_speculative_tokens: int | None = Field(None, ge=1, description="K, drafts per row and round")
    num_speculative_tokens_per_batch_size: list[tuple[int, int, int]] | None = Field(
        None, description="[[smallest batch size, largest, K], …]: fewer drafts in larger batches; K = 0 is none"
    )
    enable_adaptive_verification: bool = Field(
        False, description="draft and verify as many tokens as pay now, K at most; see docs/adaptive-length.md"
    )
    adaptive_verification_costs: dict[str, list[float]] | None = Field(
        None, description="{verify: [V(1), …, V(K+1)], draft: [D(1), …, D(K)]} in any unit, not measured: reproducible"
    )
    prompt_lookup_max: int | None = Field(None, ge=1, description="ngram: longest match looked for (default 4)")
    prompt_lookup_min: int | None = Field(None, ge=1, description="ngram: shortest match that counts (default 2)")
    use_heterogeneous_vocab: bool = Field(
        False, description="draft_model: it may have another tokenizer; only tokens that both have are drafted"
    )
    draft_sample_method: Literal["probabilistic", "greedy"] = Field(
        "probabilistic", description="at temperature > 0: sample from q, or take its argmax"
    )
    rejection_sample_method: str = Field("token", description="the verification rule at temperature > 0")

    @property
    def trained(self) -> bool:
        """Whether a checkpoint is needed."""
        return self.method is not None and self.method not in TRAINING_FREE

    @property
    def lookup_sizes(self) -> tuple[int, int]:
        """ngram: (shortest, longest) match. One given alone bounds the other's default."""
        shortest, longest = self.prompt_lookup_min, self.prompt_lookup_max
        if shortest is None:
            shortest = 2 if longest is None else min(2, longest)
        return shortest, max(4, shortest) if longest is None else longest

    @model_validator(mode="after")
    def _consistent(self) -> SpeculativeConfig:
        methods = [*FAMILIES, *TRAINING_FREE]
        if self.method is not None and self.method not in methods:
            raise ValueError(f"method {self.method!r}; expected one of {', '.join(methods)}, or None (off)")
        rules = [name for name in RULES if name != "greedy"]  # temperature 0 is greedy under any rule
        if self.rejection_sample_method not in rules:
            raise ValueError(
                f"rejection_sample_method {self.rejection_sample_method!r}; expected one of {', '.join(rules)}"
            )
        if self.method is not None and self.num_speculative_tokens is None:
            raise ValueError("num_speculative_tokens is missing: how many tokens to draft per round, such as 4")
        if self.trained and self.model is None:
            raise ValueError(f"model is missing: method {self.method!r} needs the folder of an exported head")
        if not self.trained and self.model is not None:
            raise ValueError(f"model {self.model!r} is given, but method {self.method!r} reads none")
        self._check_schedule()
        if self.adaptive_verification_costs is not None and not self.enable_adaptive_verification:
            raise ValueError("adaptive_verification_costs is given, but enable_adaptive_verification is not true")
        shortest, longest = self.lookup_sizes
        if shortest > longest:
            raise ValueError(f"prompt_lookup_min {shortest} is above prompt_lookup_max {longest}")
        if self.method != "draft_model" and self.use_heterogeneous_vocab:
            raise ValueError(f"use_heterogeneous_vocab belongs to draft_model, not to {self.method!r}")
        if self.method != "ngram" and (self.prompt_lookup_min or self.prompt_lookup_max):
            raise ValueError(f"prompt_lookup_min and prompt_lookup_max belong to ngram, not to {self.method!r}")
        return self

    def _check_schedule(self) -> None:
        before = 0
        for smallest, largest, tokens in self.num_speculative_tokens_per_batch_size or ():
            where = f"num_speculative_tokens_per_batch_size: [{smallest}, {largest}, {tokens}]"
            if not before < smallest <= largest:
                raise ValueError(f"{where}; expected [smallest, largest, K], ascending, without overlaps, from 1 on")
            if not 0 <= tokens <= (self.num_speculative_tokens or 0):
                raise ValueError(f"{where}; expected K from 0 to num_speculative_tokens, {self.num_speculative_tokens}")
            before = largest


def parse_speculative_config(options: dict[str, Any] | SpeculativeConfig | None) -> SpeculativeConfig:
    """The checked options; ConfigError names every one that is wrong or unknown. None is drafting off."""
    if options is None:
        return SpeculativeConfig(method=None)
    if isinstance(options, SpeculativeConfig):
        return options
    if not isinstance(options, dict):
        raise ConfigError(f"speculative_config is a {type(options).__name__}; expected a dict of options, or None")
    try:
        return SpeculativeConfig(**options)
    except ValidationError as error:
        faults = [_fault(each) for each in error.errors()]
        known = ", ".join(SpeculativeConfig.model_fields)
        raise ConfigError(f"speculative_config: {'; '.join(faults)} (options: {known})") from error


def _fault(error: Any) -> str:
    where = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        return f"{where}: unknown option"
    if error["type"] == "missing":
        return f"{where} is missing (it is never guessed from the path)"
    message = error["msg"].removeprefix("Value error, ")
    return f"{where}={error['input']!r}: {message}" if where else message
