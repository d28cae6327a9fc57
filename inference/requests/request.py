"""Request: one response being written. All of a row's state that outlives a round is here, and its
end is decided here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from time import perf_counter

import torch

from draftsmith.inference.metrics import SpecDecodeCounters
from draftsmith.inference.outputs import JudgedRound, SampleLogprobs
from draftsmith.inference.requests.detokenizer import Detokenizer
from draftsmith.inference.sampling.logits_processors import RequestProcessors
from draftsmith.inference.sampling_params import SamplingParams


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
        self.arrival_time = perf_counter()
        self.first_token_time: float | None = None
        self.finished_time: float | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def draft_limit(self) -> int:
        """Drafts that still have a place before the context limit; at least 1 while unfinished."""
        return self.max_model_len - len(self.token_ids)

    def commit(self, new_tokens: list[int]) -> int:
        """Appends a round's tokens up to the one that ends the response; returns how many were
        kept."""
        length = len(self.token_ids)
        kept, reason, stop_token = len(new_tokens), None, None
        if length + kept >= self.end:
            kept, reason = self.end - length, "length"
        if not self.stop_ids.isdisjoint(new_tokens):
            for i in range(max(0, self.may_stop_at - length), kept):
                if new_tokens[i] in self.stop_ids:
                    kept, reason, stop_token = i + 1, "stop", new_tokens[i]
                    break
        hidden = int(reason == "stop" and not self.params.include_stop_str_in_output)
        if self.detokenizer is not None:
            used, stop_string = self.detokenizer.push(
                new_tokens[: kept - hidden], self.may_stop_at - length
            )
            if stop_string is not None:
                kept, reason, stop_token, hidden = used, "stop", None, 0
                self.stop_reason = stop_string
        self.token_ids += new_tokens[:kept]
        del self.logprobs[len(self.token_ids) - self.num_prompt_tokens :]
        self.num_hidden_tokens = hidden
        if reason is not None:
            if stop_token is not None and stop_token not in self.eos_token_ids:
                self.stop_reason = stop_token
            self.finish(reason)
        return kept

    def count_round(self, num_drafted: int, num_accepted: int, depth: int | None = None) -> None:
        """Counts one verification: what was drafted, and how much of it was committed; `depth` as
        in the counters."""
        self.counters.add(num_drafted, num_accepted, depth)
        self.accepted_per_round.append(num_accepted)
        self.drafted_per_round.append(num_drafted)

    def finish(self, reason: str) -> None:
        self.finish_reason = reason
        self.finished_time = perf_counter()
        if self.detokenizer is not None:
            self.detokenizer.finish()
