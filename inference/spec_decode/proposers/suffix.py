"""SuffixDecoding: the most frequent continuation of the last tokens, in this request's text or in
earlier responses.

Oliaro et al., arXiv 2411.04975; options and arithmetic are those of vLLM's method "suffix"
(arctic-inference). Training-free; reads committed tokens only. How long a draft is depends on how
much was matched and on how sure the counts are, so repetitive text gets long drafts and new text
none."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from typing_extensions import override

from draftsmith.inference.engine_options import option
from draftsmith.inference.requests.request import Request
from draftsmith.inference.spec_decode.proposal import Proposal
from draftsmith.inference.spec_decode.proposers.base import Proposer
from draftsmith.inference.spec_decode.proposers.options import MethodOptions
from draftsmith.inference.spec_decode.round_plan import RoundPlan

END = -1  # before, between and after texts


class Draft(NamedTuple):
    """score: expected number of right tokens. sure: of each token, given those before it, surer the
    more often the pattern was seen."""

    tokens: list[int]
    sure: list[float]
    score: float


class Match(NamedTuple):
    """places: where a pattern ends in the texts. budget: drafts that its length allows."""

    places: np.ndarray
    budget: int


class SuffixIndex:
    """Texts, and where each token stands in them, counted from 1: all that is needed to count what
    followed a pattern."""

    def __init__(self) -> None:
        self._text = array("i", [END, END])
        self._places: dict[int, array[int]] = {}  # of each token, ascending

    def __len__(self) -> int:
        """Tokens, if it holds one text."""
        return len(self._text) - 2

    def begin(self) -> None:
        """Another text follows."""
        self._text.append(END)

    def extend(self, tokens: Iterable[int]) -> None:
        """Goes on with the last text."""
        for token in tokens:
            self._places.setdefault(token, array("i")).append(len(self._text) - 1)
            self._text[-1] = token
            self._text.append(END)

    def matches(self, context: Sequence[int]) -> list[np.ndarray]:
        """Where the last 1, 2, … tokens of the context end in the texts, as far as anything
        follows."""
        text = np.frombuffer(self._text, dtype=np.int32)
        places = np.frombuffer(self._places.get(context[-1], array("i")), dtype=np.int32)
        matches: list[np.ndarray] = []
        while len(places) > 1 or (len(places) and text[places[0] + 1] != END):
            matches.append(places)
            if len(matches) == len(context):
                break
            places = places[text[places - len(matches)] == context[-1 - len(matches)]]
        return matches

    def follow(self, places: np.ndarray, most: int, least_probability: float) -> Draft:
        """The most frequent continuation of the pattern that ends at `places`, of equals the
        latest: at most `most` tokens, as long as its probability, the product of the counts'
        ratios, is not below `least_probability`."""
        text = np.frombuffer(self._text, dtype=np.int32)
        tokens: list[int] = []
        sure: list[float] = []
        probability = 1.0
        score = 0.0
        while len(tokens) < most:
            count = len(places)
            places = places + 1
            following = Counter(text[places[::-1]].tolist())  # the latest first
            following.pop(END, None)
            if not following:
                break
            ((token, number),) = following.most_common(1)
            probability *= number / count
            if probability < least_probability:
                break
            if number < count:
                places = places[text[places] == token]
            tokens.append(token)
            sure.append(number / (count + 1))
            score += probability
        return Draft(tokens, sure, score)


class SuffixProposer(Proposer):
    """Deterministic drafts (q is one-hot)."""

    rows: dict[int, tuple[Request, SuffixIndex]]

    def __init__(self, options: SuffixOptions, device: torch.device | str = "cpu") -> None:
        super().__init__(options.most_drafts)
        self._depth = options.suffix_decoding_max_tree_depth
        self._device = device
        self._factor = options.suffix_decoding_max_spec_factor
        self._least_probability = options.suffix_decoding_min_token_prob
        # of the last `most` responses at least, and of fewer than twice as many: a second index is
        # filled too, and takes over when it holds enough
        self._most_served = options.suffix_decoding_max_cached_requests
        self._served = SuffixIndex()
        self._next = SuffixIndex()
        self._num_served = 0

    @override
    def propose(self, requests: Sequence[Request], plan: RoundPlan) -> Proposal:
        for row in [row for row in self.rows if row >= len(requests)]:
            self.reset(row)
        drafts = []
        for row, (request, limit) in enumerate(zip(requests, plan.limits, strict=True)):
            _, text = self.rows.setdefault(row, (request, SuffixIndex()))
            text.extend(request.token_ids[len(text) :])
            drafts.append(self._draft(text, request, min(limit, self.num_speculative_tokens)))
        tokens = [draft.tokens for draft in drafts]
        sure = [draft.sure for draft in drafts]
        return Proposal.deterministic(tokens, self._device, confidence=sure)

    def _draft(self, text: SuffixIndex, request: Request, most: int) -> Draft:
        """The draft with the highest score of all matches. Ties: the request's own text, then the
        longest match."""
        best = Draft([], [], 0.0)
        for index in (text, self._served):
            for match in self._matches(index, request, most):
                # no draft scores more than its length
                if match.budget <= best.score:
                    continue
                draft = index.follow(match.places, match.budget, self._least_probability)
                if draft.score > best.score:
                    best = draft
        return best

    def _matches(self, index: SuffixIndex, request: Request, most: int) -> list[Match]:
        """The different matches of the request's last tokens, the longest first.

        A longer pattern ends at some of the places of a shorter one. If it ends at as many, the
        two go on alike, and are one match: with the budget of the length that allows more."""
        matches: list[Match] = []  # the shortest first
        context = request.token_ids[1 - self._depth :]
        for length, places in enumerate(index.matches(context), 1):
            per_length = int(length * self._factor + 1e-6)
            budget = min(most, per_length, self._depth - length)
            if matches and len(matches[-1].places) == len(places):
                budget = max(budget, matches.pop().budget)
            matches.append(Match(places, budget))
        return matches[::-1]

    def reset(self, row: int) -> None:
        """Forgets the row; a response that was finished there is remembered."""
        request, _ = self.rows.pop(row, (None, None))
        if request is None or not request.finished or not self._most_served:
            return
        for index in (self._served, self._next):
            index.begin()
            index.extend(request.output_token_ids)
        self._num_served += 1
        if self._num_served % self._most_served == 0:
            self._served = self._next
            self._next = SuffixIndex()


class SuffixOptions(MethodOptions):
    """The options of `speculative_config` for the suffixes of texts that were served."""

    beside_heads: ClassVar[bool] = True
    # no text of earlier requests, so that the order of the prompts does not matter
    measured: ClassVar[dict[str, Any]] = {"suffix_decoding_max_cached_requests": 0}
    vllm: ClassVar[dict[str, Any] | None] = {}
    vllm_note: ClassVar[str] = "needs the package arctic-inference"
    vllm_notes_since: ClassVar[dict[str, str]] = {"0.33": "the V2 runner of 0.33 has no suffix"}

    suffix_decoding_max_tree_depth: int = option(24, "longest pattern, a match and its draft", ge=2)
    suffix_decoding_max_cached_requests: int = option(
        10_000,
        "finished responses remembered at least, the oldest forgotten first; 0: each request's own"
        " text only",
        ge=0,
    )
    suffix_decoding_max_spec_factor: float = option(
        1.0, "drafts per token matched", gt=0, allow_inf_nan=False
    )
    suffix_decoding_min_token_prob: float = option(
        0.1, "a draft ends before its estimated probability falls below this", ge=0, le=1
    )

    @override
    @property
    def default_tokens(self) -> int:
        """The tokens of the longest pattern."""
        return self.suffix_decoding_max_tree_depth

    @override
    def make_proposer(self, device: torch.device | str = "cpu") -> SuffixProposer:
        return SuffixProposer(self, device)
