"""Options of speculative_config that every method has. A method adds its own in a subclass, beside
its proposer, and one line in `methods.py`. Loads nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from draftsmith.inference.engine_options import option
from draftsmith.inference.spec_decode.tree_shape import TreeShape
from draftsmith.inference.spec_decode.verification.rejection_sampler import (
    AUTO,
    REJECTION_SAMPLE_METHODS,
    cannot_judge,
)

if TYPE_CHECKING:
    import torch

    from draftsmith.inference.spec_decode.proposers.base import Proposer

DEFAULT_TOKENS = 5  # where neither the user nor the drafter says how many tokens to draft


class MethodOptions(BaseModel):
    """What `speculative_config` may hold. This class alone is drafting off (method None).

    trained            the method needs the folder of a drafter
    beside_heads       it may draft beside a trained head (`with`): chains, at next to no cost, each
                       draft with a confidence
    measured           options of an evaluation, spelled out since other engines' defaults differ
    vllm               options of vLLM's speculative_config beside method and number; None: vLLM
                       has no such method
    vllm_note          a remark on, or the reason for, the above
    vllm_notes_since   further remarks, each by the first vLLM of which it is true
    sglang_algorithm   SGLang's name of the method; None: it has none
    sglang_note        a remark on it
    """

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    trained: ClassVar[bool] = False
    beside_heads: ClassVar[bool] = False
    measured: ClassVar[dict[str, Any]] = {}
    vllm: ClassVar[dict[str, Any] | None] = None
    vllm_note: ClassVar[str] = ""
    vllm_notes_since: ClassVar[dict[str, str]] = {}
    sglang_algorithm: ClassVar[str | None] = None
    sglang_note: ClassVar[str] = ""

    method: str | None = Field(
        None, description="family of the drafter, ngram, suffix, lookahead, or None: drafting off"
    )
    num_speculative_tokens: int | None = option(
        None, "K, drafts per row and round; default: as the drafter or the method says", ge=1
    )
    num_speculative_tokens_per_batch_size: list[tuple[int, int, int]] | None = option(
        None,
        "[[smallest batch size, largest, K], …]: fewer drafts in larger batches; K = 0 is none",
    )
    enable_adaptive_verification: bool = option(
        False,
        "draft and verify as many tokens as pay now, K at most (docs/runtime.md)",
    )
    adaptive_verification_costs: dict[str, list[float]] | None = option(
        None,
        "{verify: [V(1), …, V(K+1)], draft: [D(1), …, D(K)]} in any unit, not measured:"
        " reproducible",
    )
    rejection_sample_method: str = option(
        AUTO,
        "the verification rule at temperature > 0; auto: block for sampled chains, traversal for"
        " sampled trees, sample_match for deterministic drafts",
    )

    @property
    def tree(self) -> TreeShape | None:
        """The shape of the drafts; None: chains, or the method's own business."""
        return None

    @property
    def beside(self) -> MethodOptions | None:
        """The method that drafts beside this one; None: it drafts alone."""
        return None

    @property
    def fixed_shape(self) -> bool:
        """True if neither the number of its drafts nor their tree can adapt."""
        return self.tree is not None

    @property
    def samples(self) -> bool:
        """True if its drafts may be sampled from a distribution that verification knows."""
        return False

    @property
    def default_tokens(self) -> int | None:
        """K where none is given; None: it must be."""
        return DEFAULT_TOKENS

    @property
    def most_drafts(self) -> int:
        """K; 0 with drafting off."""
        return self.num_speculative_tokens or 0

    def make_proposer(self, device: torch.device | str = "cpu") -> Proposer:
        """Who drafts. Trained methods are made with their drafter by `LLM`."""
        raise NotImplementedError

    @model_validator(mode="after")
    def _consistent(self) -> MethodOptions:
        if self.rejection_sample_method not in REJECTION_SAMPLE_METHODS:
            known = ", ".join(REJECTION_SAMPLE_METHODS)
            raise ValueError(
                f"rejection_sample_method {self.rejection_sample_method!r}; expected one of {known}"
            )
        rule = self.rejection_sample_method
        if self.method is not None and (
            reason := cannot_judge(rule, chain=not self.fixed_shape, sampled=self.samples)
        ):
            raise ValueError(reason)
        if self.method is not None and self.num_speculative_tokens is None:
            if self.default_tokens is None:
                raise ValueError(
                    "num_speculative_tokens is missing: how many tokens to draft per round, such"
                    " as 4"
                )
            object.__setattr__(self, "num_speculative_tokens", self.default_tokens)
        self._check_schedule()
        by_costs = self.enable_adaptive_verification or self.beside is not None
        if self.adaptive_verification_costs is not None and not by_costs:
            raise ValueError(
                "adaptive_verification_costs is given, but enable_adaptive_verification is not true"
            )
        if self.enable_adaptive_verification and self.fixed_shape:
            raise ValueError(
                "enable_adaptive_verification chooses the length of chains, and the shape of these"
                " drafts is fixed"
            )
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
            if not 0 <= tokens <= self.most_drafts:
                raise ValueError(
                    f"{where}; expected K from 0 to num_speculative_tokens, {self.most_drafts}"
                )
            before = largest
