"""Prompt lookup: what followed the last tokens when they were seen before. Training-free; reads
committed tokens only.

Saxena, "Prompt Lookup Decoding" (2023). The longest match wins; among equally long ones the most
recent does, since text repeats what it said last (vLLM takes the first one instead). A continuation
that reaches the end of the text goes on with what it has drafted itself, as a repetition would, so
a match gives as many tokens as are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from pydantic import model_validator
from typing_extensions import override

from draftsmith.inference.engine_options import option
from draftsmith.inference.requests.request import Request
from draftsmith.inference.spec_decode.proposal import Proposal
from draftsmith.inference.spec_decode.proposers.base import Proposer
from draftsmith.inference.spec_decode.proposers.options import MethodOptions
from draftsmith.inference.spec_decode.proposers.suffix import SuffixIndex
from draftsmith.inference.spec_decode.round_plan import RoundPlan


class NgramIndex(SuffixIndex):
    """One text, and the last continuation of the n-gram that it ends with."""

    def __init__(self, min_n: int, max_n: int) -> None:
        super().__init__()
        self._min_n = min_n
        self._max_n = max_n
        self.matched = 0  # tokens of the match that was found last

    def lookup(self, token_ids: list[int], count: int) -> list[int]:
        """`count` tokens to follow the text, or [] without a match. Between calls the text only
        grows."""
        self.extend(token_ids[len(self) :])
        matches = self.matches(token_ids[-self._max_n :])
        if len(matches) < self._min_n:
            return []
        self.matched = len(matches)
        start = int(matches[-1][-2])  # the last place is the text's own end
        drafts = token_ids[start : start + count]
        # where the text ends before `count` tokens, what it ends with is repeated
        period = len(token_ids) - start
        while len(drafts) < count:
            drafts.append(drafts[len(drafts) - period])
        return drafts


class NgramProposer(Proposer):
    """Deterministic drafts (q is one-hot). Nothing is drafted for a row without a match of at least
    `prompt_lookup_min` tokens."""

    def __init__(self, options: NgramOptions, device: torch.device | str = "cpu") -> None:
        super().__init__(options.most_drafts)
        shortest = options.prompt_lookup_min
        longest = options.prompt_lookup_max
        if "prompt_lookup_min" not in options.model_fields_set:
            shortest = min(shortest, longest)  # one size bounds the other's default
        self._sizes = shortest, max(shortest, longest)
        self._device = device

    @override
    def propose(self, requests: Sequence[Request], plan: RoundPlan) -> Proposal:
        drafts: list[list[int]] = []
        confidence: list[list[float]] = []
        for row, (request, limit) in enumerate(zip(requests, plan.limits, strict=True)):
            index = self.rows.setdefault(row, NgramIndex(*self._sizes))
            most = min(limit, self.num_speculative_tokens)
            drafts.append(index.lookup(request.token_ids, most))
            confidence.append([index.matched / (index.matched + 1)] * len(drafts[-1]))
        return Proposal.deterministic(drafts, self._device, confidence=confidence)


class NgramOptions(MethodOptions):
    """The options of `speculative_config` for the latest n-gram that matches."""

    beside_heads: ClassVar[bool] = True
    measured: ClassVar[dict[str, Any]] = {"prompt_lookup_min": 2, "prompt_lookup_max": 4}
    vllm: ClassVar[dict[str, Any] | None] = measured
    sglang_algorithm: ClassVar[str | None] = "NGRAM"
    sglang_note: ClassVar[str] = (
        "SGLang keeps a tree of n-grams of all requests, not the latest match"
    )

    prompt_lookup_max: int = option(4, "longest match looked for", ge=1)
    prompt_lookup_min: int = option(2, "shortest match that counts", ge=1)

    @model_validator(mode="after")
    def _check_sizes(self) -> NgramOptions:
        shortest = self.prompt_lookup_min
        longest = self.prompt_lookup_max
        both = self.model_fields_set >= {"prompt_lookup_min", "prompt_lookup_max"}
        if both and shortest > longest:
            raise ValueError(f"prompt_lookup_min {shortest} is above prompt_lookup_max {longest}")
        return self

    @override
    def make_proposer(self, device: torch.device | str = "cpu") -> NgramProposer:
        return NgramProposer(self, device)
