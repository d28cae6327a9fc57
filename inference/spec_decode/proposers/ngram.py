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

from draftsmith.inference.requests.request import Request
from draftsmith.inference.spec_decode.proposal import Proposal
from draftsmith.inference.spec_decode.proposers.base import Proposer
from draftsmith.inference.spec_decode.proposers.options import MethodOptions, option


class NgramIndex:
    """The last continuation of each n-gram of one text. Appending a token costs O(max_n -
    min_n)."""

    def __init__(self, min_n: int, max_n: int) -> None:
        self._sizes = range(max_n, min_n - 1, -1)
        # n-gram -> index of the token after its last occurrence
        self._follower: dict[tuple[int, ...], int] = {}
        self._indexed = 0  # n-grams followed by tokens before this index are known
        self.matched = 0  # tokens of the match that was found last

    def lookup(self, token_ids: list[int], count: int) -> list[int]:
        """`count` tokens to follow the text, or [] without a match. Between calls the text only
        grows."""
        follower, sizes = self._follower, self._sizes
        length = len(token_ids)
        for at in range(max(self._indexed, 1), length):
            for n in sizes:
                if n <= at:
                    follower[tuple(token_ids[at - n : at])] = at
        self._indexed = length
        for n in sizes:
            if n < length:
                start = follower.get(tuple(token_ids[length - n :]))
                if start is not None:
                    self.matched = n
                    drafts = token_ids[start : start + count]
                    while len(drafts) < count:  # the text ended: what it ends with is repeated
                        drafts.append(drafts[start - length])
                    return drafts
        return []


class NgramProposer(Proposer):
    """Deterministic drafts (q is one-hot). Nothing is drafted for a row without a match of at least
    `min_n` tokens."""

    def __init__(
        self,
        num_speculative_tokens: int,
        min_n: int,
        max_n: int,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(num_speculative_tokens)
        self._min_n, self._max_n, self._device = min_n, max_n, device
        self._indices: dict[int, NgramIndex] = {}  # by row

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> Proposal:
        drafts = [
            self._indices[row].lookup(
                request.token_ids, min(limits[row], self.num_speculative_tokens)
            )
            for row, request in enumerate(requests)
        ]
        proposal = Proposal.deterministic(drafts, self._device)
        matched = [self._indices[row].matched for row in range(len(drafts))]
        proposal.confidence = torch.tensor(
            [[n / (n + 1)] * proposal.width for n in matched], dtype=torch.float64
        )
        return proposal

    def reset(self, row: int) -> None:
        self._indices[row] = NgramIndex(self._min_n, self._max_n)

    def move(self, src_row: int, dst_row: int) -> None:
        self._indices[dst_row] = self._indices.pop(src_row)


class NgramOptions(MethodOptions):
    measured: ClassVar[dict[str, Any]] = {"prompt_lookup_min": 2, "prompt_lookup_max": 4}
    vllm: ClassVar[dict[str, Any] | None] = measured
    sglang_algorithm: ClassVar[str | None] = "NGRAM"
    sglang_note: ClassVar[str] = (
        "SGLang keeps a tree of n-grams of all requests, not the latest match"
    )

    prompt_lookup_max: int | None = option(None, "longest match looked for (default 4)", ge=1)
    prompt_lookup_min: int | None = option(None, "shortest match that counts (default 2)", ge=1)

    @property
    def lookup_sizes(self) -> tuple[int, int]:
        """(shortest, longest) match. One given alone bounds the other's default."""
        shortest, longest = self.prompt_lookup_min, self.prompt_lookup_max
        if shortest is None:
            shortest = 2 if longest is None else min(2, longest)
        return shortest, max(4, shortest) if longest is None else longest

    @model_validator(mode="after")
    def _check_sizes(self) -> NgramOptions:
        shortest, longest = self.lookup_sizes
        if shortest > longest:
            raise ValueError(f"prompt_lookup_min {shortest} is above prompt_lookup_max {longest}")
        return self

    def make_proposer(self, device: torch.device) -> NgramProposer:
        assert self.num_speculative_tokens is not None
        return NgramProposer(self.num_speculative_tokens, *self.lookup_sizes, device)
