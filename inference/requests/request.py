"""Request: one response being written. All of a row's state that outlives a round is here, and its
end is decided here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch

from draftsmith.inference.metrics import SpecDecodeCounters
from draftsmith.inference.outputs import JudgedRound, SampleLogprobs
from draftsmith.inference.requests.detokenizer import Detokenizer
from draftsmith.inference.sampling.logits_processors import RequestProcessors
from draftsmith.inference.sampling_params import SamplingParams


@dataclass(frozen=True)
class _End:
    """How a round ends a response.

    kept          tokens of the round that belong to it
    reason        "length" or "stop"
    stop_reason   the string or token that ended it; None for an end of sequence, or the length
    hidden        1 if the last token is a stop token that the text does not show, else 0
    """

    kept: int
    reason: str
    stop_reason: int | str | None = None
    hidden: int = 0


class Request:
    """token_ids (prompt and output) are the committed text; its last token, the anchor, is not in
    any cache yet.

    most_drafts      of a round, as its parameters say; 0 is a request that is not drafted for
    end              the length token_ids may reach: max_tokens or the context limit, whichever
                     comes first
    stop_ids         tokens that end the response, the end-of-sequence tokens among them unless
                     ignored
    finish_reason    None while unfinished, then "stop", "length" or "abort"; "error" if it alone
                     cannot go on
    processors       what it changes in its logits
    logprobs         of each output token, if its parameters ask
    rounds           those that nobody took yet, where somebody set it to a list; else None
    """

    def __init__(
        self,
        request_id: str,
        index: int,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        generator: torch.Generator | None,
        max_model_len: int,
        eos_token_ids: Iterable[int] = (),
        detokenizer: Detokenizer | None = None,
        bad_words: Sequence[Sequence[int]] = (),
    ) -> None:
        self.request_id = request_id
        self.index = index
        self.params = params
        self.generator = generator
        self.detokenizer = detokenizer
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.max_model_len = max_model_len
        longest = max_model_len if params.max_tokens is None else params.max_tokens
        self.end = min(max_model_len, self.num_prompt_tokens + longest)
        self.eos_token_ids = frozenset() if params.ignore_eos else frozenset(eos_token_ids)
        self.stop_ids = self.eos_token_ids | frozenset(params.stop_token_ids)
        drafts = params.num_speculative_tokens
        self.most_drafts = max_model_len if drafts is None else drafts
        # first position whose token may end it
        self.may_stop_at = self.num_prompt_tokens + params.min_tokens
        self.processors = RequestProcessors(params, prompt_token_ids, self.stop_ids, bad_words)
        self.logprobs: SampleLogprobs = []
        self.rounds: list[JudgedRound] | None = None
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        # 1 if the response ends with a stop token that its text does not show
        self.num_hidden_tokens = 0
        self.counters = SpecDecodeCounters()
        self.accepted_per_round: list[int] = []
        self.drafted_per_round: list[int] = []
        self.num_compiled_rounds = 0
        self.arrival_time = perf_counter()
        self.first_token_time: float | None = None
        self.finished_time: float | None = None

    @property
    def finished(self) -> bool:
        """True once nothing more is written."""
        return self.finish_reason is not None

    @property
    def output_token_ids(self) -> list[int]:
        """The committed tokens after the prompt."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def draft_limit(self) -> int:
        """Drafts that still have a place before the context limit; at least 1 while unfinished."""
        return self.max_model_len - len(self.token_ids)

    def commit(self, new_tokens: list[int]) -> int:
        """Appends a round's tokens up to the one that ends the response; returns how many were
        kept."""
        length = len(self.token_ids)
        end = self._end_by_token(new_tokens) or self._end_by_length(length + len(new_tokens))
        shown = new_tokens if end is None else new_tokens[: end.kept - end.hidden]
        if self.detokenizer is not None:
            used, stop_string = self.detokenizer.push(shown, self.may_stop_at - length)
            if stop_string is not None:
                end = _End(used, "stop", stop_string)
        kept = len(new_tokens) if end is None else end.kept
        self.token_ids += new_tokens[:kept]
        del self.logprobs[len(self.token_ids) - self.num_prompt_tokens :]
        if end is not None:
            self.num_hidden_tokens = end.hidden
            self.stop_reason = end.stop_reason
            self.finish(end.reason)
        return kept

    def _end_by_token(self, new_tokens: list[int]) -> _End | None:
        """The end at the first stop token among those that have a place, if there is one."""
        if self.stop_ids.isdisjoint(new_tokens):
            return None
        length = len(self.token_ids)
        places = range(max(0, self.may_stop_at - length), min(len(new_tokens), self.end - length))
        for i in places:
            token = new_tokens[i]
            if token in self.stop_ids:
                reason = None if token in self.eos_token_ids else token
                hidden = int(not self.params.include_stop_str_in_output)
                return _End(i + 1, "stop", reason, hidden)
        return None

    def _end_by_length(self, length: int) -> _End | None:
        """The end of a text that would have `length` tokens, if those are too many."""
        return _End(self.end - len(self.token_ids), "length") if length >= self.end else None

    def count_round(
        self,
        num_drafted: int,
        num_accepted: int,
        depth: int | None = None,
        method: str | None = None,
    ) -> None:
        """Counts one verification: what was drafted, and how much of it was committed; `depth` and
        `method` as in the counters."""
        self.counters.add(num_drafted, num_accepted, depth, method)
        self.accepted_per_round.append(num_accepted)
        self.drafted_per_round.append(num_drafted)

    def finish(self, reason: str) -> None:
        """Ends the response; `reason`: its finish_reason."""
        self.finish_reason = reason
        self.finished_time = perf_counter()
        if self.detokenizer is not None:
            self.detokenizer.finish()
