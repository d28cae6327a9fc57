"""SuffixDecoding: the most frequent continuation of the last tokens, in this request's text or in
earlier responses.

Oliaro et al., arXiv 2411.04975; options and arithmetic are those of vLLM's method "suffix"
(arctic-inference). Training-free; reads committed tokens only. How long a draft is depends on how
much was matched and on how sure the counts are, so repetitive text gets long drafts and new text
none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from draftsmith.inference.requests.request import Request
from draftsmith.inference.spec_decode.proposal import Proposal
from draftsmith.inference.spec_decode.proposers.base import Proposer
from draftsmith.inference.spec_decode.proposers.options import MethodOptions, option
from draftsmith.inference.spec_decode.proposers.suffix_automaton import SuffixCounts, SuffixStore


class _Row:
    def __init__(self, request: Request, depth: int) -> None:
        self.request, self.counts, self._known = request, SuffixCounts(depth), 0

    def catch_up(self) -> None:
        """Counts what was committed since the last call."""
        token_ids = self.request.token_ids
        self.counts.extend(token_ids[self._known :])
        self._known = len(token_ids)


class SuffixProposer(Proposer):
    """Deterministic drafts (q is one-hot).

    max_tree_depth       longest pattern counted: the match and its draft together are no longer
    max_cached_requests  finished responses remembered at least, the oldest forgotten first; 0:
                         each request's own text only
    max_spec_factor      tokens drafted per token matched
    min_token_prob       a draft ends before its estimated probability falls below this
    """

    def __init__(
        self,
        num_speculative_tokens: int,
        *,
        max_tree_depth: int,
        max_cached_requests: int,
        max_spec_factor: float,
        min_token_prob: float,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(num_speculative_tokens)
        self._depth, self._least_probability, self._device = max_tree_depth, min_token_prob, device
        # drafts for a match of each length
        self._budget = [
            min(int(m * max_spec_factor + 1e-6), max_tree_depth - m) for m in range(max_tree_depth)
        ]
        # the length that gives the most
        self._ample = max(range(max_tree_depth), key=self._budget.__getitem__)
        self._store = SuffixStore(max_tree_depth, max_cached_requests)
        self._rows: dict[int, _Row] = {}

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> Proposal:
        for row in [row for row in self._rows if row >= len(requests)]:
            self.reset(row)
        drafts, confidence = [], []
        for row, request in enumerate(requests):
            if row not in self._rows:
                self._rows[row] = _Row(request, self._depth)
            self._rows[row].catch_up()
            tokens, sure = self._draft(
                self._rows[row], min(limits[row], self.num_speculative_tokens)
            )
            drafts.append(tokens)
            confidence.append(sure)
        proposal = Proposal.deterministic(drafts, self._device)
        padded = [sure + [0.5] * (proposal.width - len(sure)) for sure in confidence]
        proposal.confidence = torch.tensor(padded, dtype=torch.float64).view(
            len(drafts), proposal.width
        )
        return proposal

    def _draft(self, row: _Row, most: int) -> tuple[list[int], list[float]]:
        """The draft with the highest score of all matches. Ties: the request's own text, then the
        longest match."""
        earlier = self._store.counts
        matches = earlier.matches(row.request.token_ids[1 - self._depth :])
        candidates = [(row.counts, row.counts.endings()), (earlier, matches)]
        drafted: list[int] = []
        confidence: list[float] = []
        best = 0.0
        for counts, matches in candidates:
            for state, shortest, longest in matches:
                # a state's patterns have one continuation: the length among them that allows the
                # longest draft
                budget = self._budget[min(max(self._ample, shortest), longest)]
                tokens, score, sure = counts.follow(
                    state, min(most, budget), self._least_probability
                )
                if score > best:
                    drafted, best, confidence = tokens, score, sure
        return drafted, confidence

    def reset(self, row: int) -> None:
        """Forgets the row; a response that was finished there is remembered."""
        left = self._rows.pop(row, None)
        if left is not None and left.request.finished:
            self._store.add(left.request.output_token_ids)

    def move(self, src_row: int, dst_row: int) -> None:
        self.reset(dst_row)
        if src_row in self._rows:
            self._rows[dst_row] = self._rows.pop(src_row)


class SuffixOptions(MethodOptions):
    # no text of earlier requests, so that the order of the prompts does not matter
    measured: ClassVar[dict[str, Any]] = {"suffix_decoding_max_cached_requests": 0}
    vllm: ClassVar[dict[str, Any] | None] = {}
    vllm_note: ClassVar[str] = "needs the package arctic-inference"

    suffix_decoding_max_tree_depth: int = option(24, "longest pattern, a match and its draft", ge=2)
    suffix_decoding_max_cached_requests: int = option(10_000, "finished responses kept", ge=0)
    suffix_decoding_max_spec_factor: float = option(
        1.0, "drafts per token matched", gt=0, allow_inf_nan=False
    )
    suffix_decoding_min_token_prob: float = option(
        0.1, "least estimated probability of a draft", ge=0, le=1
    )

    @property
    def default_tokens(self) -> int:
        return self.suffix_decoding_max_tree_depth

    def make_proposer(self, device: torch.device) -> SuffixProposer:
        assert self.num_speculative_tokens is not None
        return SuffixProposer(
            self.num_speculative_tokens,
            max_tree_depth=self.suffix_decoding_max_tree_depth,
            max_cached_requests=self.suffix_decoding_max_cached_requests,
            max_spec_factor=self.suffix_decoding_max_spec_factor,
            min_token_prob=self.suffix_decoding_min_token_prob,
            device=device,
        )
