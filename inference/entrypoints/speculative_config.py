"""speculative_config: how the target is drafted for, under vLLM's option names. Knows no model and
loads nothing."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from inference.spec_decode.tree_shape import DynamicTree, StaticTree, TreeShape
from inference.spec_decode.verification.rejection_sampler import AUTO, METHODS
from speculators.errors import ConfigError
from speculators.registry import FAMILIES

TRAINING_FREE = ("ngram", "suffix", "lookahead")
OPTION_PREFIXES = {
    "ngram": "prompt_lookup_",
    "suffix": "suffix_decoding_",
    "lookahead": "lookahead_",
}


def option(default: Any, description: str, **limits: Any) -> Any:
    return Field(default, description=description, **limits)


class SpeculativeConfig(BaseModel):
    """Options of `LLM(speculative_config={...})`."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    method: str | None = Field(
        description="family of the drafter, ngram, suffix, lookahead, or None: drafting off"
    )
    model: str | None = option(None, "folder or repository id of an exported head")
    num_speculative_tokens: int | None = option(
        None, "K, drafts per row and round; default: as the drafter says", ge=1
    )
    num_speculative_tokens_per_batch_size: list[tuple[int, int, int]] | None = option(
        None,
        "[[smallest batch size, largest, K], …]: fewer drafts in larger batches; K = 0 is none",
    )
    enable_adaptive_verification: bool = option(
        False,
        "draft and verify as many tokens as pay now, K at most (docs/adaptive-length.md); with"
        " speculative_eagle_topk as many places of a tree as pay (docs/trees.md)",
    )
    adaptive_verification_costs: dict[str, list[float]] | None = option(
        None,
        "{verify: [V(1), …, V(K+1)], draft: [D(1), …, D(K)]} in any unit, not measured:"
        " reproducible",
    )
    prompt_lookup_max: int | None = option(
        None, "ngram: longest match looked for (default 4)", ge=1
    )
    prompt_lookup_min: int | None = option(
        None, "ngram: shortest match that counts (default 2)", ge=1
    )
    suffix_decoding_max_tree_depth: int = option(
        24, "suffix: longest pattern, a match and its draft", ge=2
    )
    suffix_decoding_max_cached_requests: int = option(
        10_000, "suffix: finished responses remembered", ge=0
    )
    suffix_decoding_max_spec_factor: float = option(
        1.0, "suffix: drafts per token matched", gt=0, allow_inf_nan=False
    )
    suffix_decoding_min_token_prob: float = option(
        0.1, "suffix: least estimated probability of a draft", ge=0, le=1
    )
    lookahead_window_size: int = option(15, "lookahead: columns of the window, W", ge=1)
    lookahead_ngram_size: int = option(5, "lookahead: tokens of an n-gram, N", ge=3)
    lookahead_num_guesses: int = option(
        15, "lookahead: n-grams kept per first token, and verified in a round, G", ge=1
    )
    lookahead_pool_from_prompt: bool = option(
        True, "lookahead: n-grams of prompt and committed text are guesses too"
    )
    use_heterogeneous_vocab: bool = option(
        False, "draft_model: of another tokenizer; only shared tokens are drafted"
    )
    draft_sample_method: Literal["probabilistic", "greedy"] = option(
        "probabilistic", "at temperature > 0: sample from q, or take its argmax"
    )
    speculative_token_tree: str | list[list[int]] | None = option(
        None,
        "trained drafters: a fixed tree of drafts, as the ranks on the way to each, such as [(0,),"
        " (1,), (0, 0)]; num_speculative_tokens is then its size",
    )
    speculative_eagle_topk: int | None = option(
        None,
        "trained drafters: a tree grown every round, of so many drafts per level to go on from;"
        " num_speculative_tokens is how many places of it are verified",
        ge=1,
    )
    speculative_num_steps: int | None = option(None, "levels of that tree", ge=1)
    rejection_sample_method: str = option(
        AUTO,
        "the verification rule at temperature > 0; auto: block for sampled chains, traversal for"
        " sampled trees, sample_match for deterministic drafts",
    )

    @property
    def trained(self) -> bool:
        """True if the method needs a checkpoint."""
        return self.method is not None and self.method not in TRAINING_FREE

    @property
    def lookup_sizes(self) -> tuple[int, int]:
        """ngram: (shortest, longest) match. One given alone bounds the other's default."""
        shortest, longest = self.prompt_lookup_min, self.prompt_lookup_max
        if shortest is None:
            shortest = 2 if longest is None else min(2, longest)
        return shortest, max(4, shortest) if longest is None else longest

    @property
    def tree(self) -> TreeShape | None:
        """The shape of the drafts; None: chains."""
        if self.speculative_token_tree is not None:
            return StaticTree.parse(self.speculative_token_tree)
        if self.speculative_eagle_topk is None or self.num_speculative_tokens is None:
            return None
        steps = self.speculative_num_steps or min(5, self.num_speculative_tokens)
        return DynamicTree(self.speculative_eagle_topk, steps, self.num_speculative_tokens)

    def _check_tree(self) -> None:
        names = ("speculative_token_tree", "speculative_eagle_topk", "speculative_num_steps")
        given = [name for name in names if getattr(self, name) is not None]
        if not given:
            return
        if not self.trained:
            raise ValueError(f"{given[0]} belongs to trained drafters, not to {self.method!r}")
        if "speculative_token_tree" in given and len(given) > 1:
            raise ValueError(
                f"speculative_token_tree is a fixed tree, and {given[1]} is of one that grows;"
                " give one"
            )
        if given == ["speculative_num_steps"]:
            raise ValueError(
                "speculative_num_steps is of a tree that grows; give speculative_eagle_topk with it"
            )
        try:
            tree = self.tree
        except ConfigError as error:
            raise ValueError(str(error)) from None
        if tree is not None and tree.budget != self.num_speculative_tokens:
            raise ValueError(
                f"num_speculative_tokens is {self.num_speculative_tokens}, but"
                f" speculative_token_tree has {tree.budget} choices; they must be as many"
            )

    @property
    def proposer_options(self) -> dict[str, Any]:
        """suffix, lookahead: the options of its proposer."""
        prefix = OPTION_PREFIXES[str(self.method)]
        names = [name for name in SpeculativeConfig.model_fields if name.startswith(prefix)]
        return {name.removeprefix(prefix): getattr(self, name) for name in names}

    @model_validator(mode="after")
    def _consistent(self) -> SpeculativeConfig:
        methods = [*FAMILIES, *TRAINING_FREE]
        if self.method is not None and self.method not in methods:
            raise ValueError(
                f"method {self.method!r}; expected one of {', '.join(methods)}, or None (off)"
            )
        if self.rejection_sample_method not in METHODS:
            known = ", ".join(METHODS)
            raise ValueError(
                f"rejection_sample_method {self.rejection_sample_method!r}; expected one of {known}"
            )
        if self.num_speculative_tokens is None and self.method in ("suffix", "lookahead"):
            pool = self.lookahead_num_guesses * (self.lookahead_ngram_size - 1)
            most = self.suffix_decoding_max_tree_depth if self.method == "suffix" else pool
            object.__setattr__(self, "num_speculative_tokens", most)
        if self.method is not None and self.num_speculative_tokens is None:
            raise ValueError(
                "num_speculative_tokens is missing: how many tokens to draft per round, such as 4"
            )
        if self.trained and self.model is None:
            raise ValueError(
                f"model is missing: method {self.method!r} needs the folder of an exported head"
            )
        if not self.trained and self.model is not None:
            raise ValueError(
                f"model {self.model!r} is given, but method {self.method!r} reads none"
            )
        self._check_tree()
        self._check_schedule()
        if self.adaptive_verification_costs is not None and not self.enable_adaptive_verification:
            raise ValueError(
                "adaptive_verification_costs is given, but enable_adaptive_verification is not true"
            )
        if self.enable_adaptive_verification and (
            isinstance(self.tree, StaticTree) or self.method == "lookahead"
        ):
            raise ValueError(
                "enable_adaptive_verification chooses the length of chains and the size of trees"
                " that grow (speculative_eagle_topk), and the shape of these drafts is fixed"
            )
        shortest, longest = self.lookup_sizes
        if shortest > longest:
            raise ValueError(f"prompt_lookup_min {shortest} is above prompt_lookup_max {longest}")
        if self.method != "draft_model" and self.use_heterogeneous_vocab:
            raise ValueError(
                f"use_heterogeneous_vocab belongs to draft_model, not to {self.method!r}"
            )
        for owner, prefix in OPTION_PREFIXES.items():
            given = [name for name in sorted(self.model_fields_set) if name.startswith(prefix)]
            if self.method != owner and any(getattr(self, name) is not None for name in given):
                raise ValueError(f"{' and '.join(given)} belong to {owner}, not to {self.method!r}")
        return self

    def _check_schedule(self) -> None:
        before = 0
        for smallest, largest, tokens in self.num_speculative_tokens_per_batch_size or ():
            where = f"num_speculative_tokens_per_batch_size: [{smallest}, {largest}, {tokens}]"
            if not before < smallest <= largest:
                raise ValueError(
                    f"{where}; expected [smallest, largest, K], ascending, without overlaps, from"
                    " 1 on"
                )
            if not 0 <= tokens <= (self.num_speculative_tokens or 0):
                raise ValueError(
                    f"{where}; expected K from 0 to num_speculative_tokens,"
                    f" {self.num_speculative_tokens}"
                )
            before = largest


def parse_speculative_config(
    options: dict[str, Any] | SpeculativeConfig | None,
) -> SpeculativeConfig:
    """The checked options; ConfigError names every one that is wrong or unknown. None is drafting
    off."""
    if options is None:
        return SpeculativeConfig(method=None)
    if isinstance(options, SpeculativeConfig):
        return options
    if not isinstance(options, dict):
        raise ConfigError(
            f"speculative_config is a {type(options).__name__}; expected a dict of options, or None"
        )
    if odd := [name for name in options if not isinstance(name, str)]:
        raise ConfigError(
            f"speculative_config: the name of an option is {odd[0]!r}; expected a string"
        )
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
    if error["type"] == "missing" and where == "method":
        return f"{where} is missing: name one, or the model of a drafter, whose config.json says it"
    message = error["msg"].removeprefix("Value error, ")
    return f"{where}={error['input']!r}: {message}" if where else message
