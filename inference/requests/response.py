"""Response: the n requests of one prompt, as the output the user sees, whole or in pieces."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from draftsmith.inference.outputs import (
    CompletionOutput,
    RequestMetrics,
    RequestOutput,
    SampleLogprobs,
)
from draftsmith.inference.requests.detokenizer import Detokenizer
from draftsmith.inference.requests.request import Request


class Response:
    """`prompt`: None if it came as token ids. `requests`: one for each response. `tokenizer`: None
    if no text is requested. `decodes_logprobs`: False leaves the texts of log-probabilities to
    `decode_logprobs`."""

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        requests: Sequence[Request],
        tokenizer: Any,
        decodes_logprobs: bool = True,
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self.requests = requests
        self.tokenizer = tokenizer
        self.decodes_logprobs = decodes_logprobs
        self._sent = [0] * len(requests)  # output tokens that `delta` has handed out
        self._ended = [False] * len(requests)  # whether `delta` has reported the end

    @property
    def finished(self) -> bool:
        """True once all of the requests are."""
        return all(request.finished for request in self.requests)

    def output(self) -> RequestOutput:
        """Everything there is."""
        return self._output(
            [self._completion(request, self._text(request), 0) for request in self.requests]
        )

    def delta(self) -> RequestOutput | None:
        """The text and tokens added since the last call; None if there are none. The end is
        reported exactly once."""
        new = []
        for i, request in enumerate(self.requests):
            written = len(request.token_ids) - request.num_prompt_tokens
            text = request.detokenizer.take() if request.detokenizer is not None else ""
            if written > self._sent[i] or text or request.finished > self._ended[i]:
                new.append(self._completion(request, text, self._sent[i]))
            self._sent[i] = written
            self._ended[i] = request.finished
        return self._output(new) if new else None

    def _output(self, completions: list[CompletionOutput]) -> RequestOutput:
        return RequestOutput(
            self.request_id,
            self.prompt,
            self.prompt_token_ids,
            completions,
            self.finished,
            _metrics(self.requests),
        )

    def _completion(self, request: Request, text: str, start: int) -> CompletionOutput:
        """With what was written from output token `start` on."""
        completion = CompletionOutput(
            request.index,
            text,
            request.output_token_ids[start:],
            request.finish_reason,
            request.stop_reason,
            copy.deepcopy(request.counters),
        )
        if request.rounds is not None:
            completion.rounds = request.rounds
            request.rounds = []
        if request.params.logprobs is not None:
            completion.logprobs = request.logprobs[start:]
            entries = zip(request.output_token_ids, request.logprobs, strict=True)
            completion.cumulative_logprob = sum(entry[token].logprob for token, entry in entries)
            if self.decodes_logprobs:
                decode_logprobs(completion.logprobs, self.tokenizer)
        return completion

    def _text(self, request: Request) -> str:
        if request.detokenizer is not None:
            return request.detokenizer.text
        if self.tokenizer is None:
            return ""
        # a response that needed no text on the way
        detokenizer = Detokenizer(self.tokenizer, self.prompt_token_ids, request.params)
        output = request.output_token_ids
        detokenizer.push(output[: len(output) - request.num_hidden_tokens])
        return detokenizer.finish()


def decode_logprobs(logprobs: SampleLogprobs, tokenizer: Any) -> None:
    """Sets the texts of the tokens; without a tokenizer they stay None."""
    if tokenizer is None:
        return
    for entry in logprobs:
        for token, logprob in entry.items():
            logprob.decoded_token = tokenizer.decode([token])


def _metrics(requests: Sequence[Request]) -> RequestMetrics:
    first = [r.first_token_time for r in requests if r.first_token_time is not None]
    finished = [r.finished_time for r in requests if r.finished_time is not None]
    metrics = RequestMetrics(
        arrival_time=min(r.arrival_time for r in requests),
        first_token_time=min(first, default=None),
        finished_time=max(finished) if len(finished) == len(requests) else None,
        num_compiled_rounds=sum(request.num_compiled_rounds for request in requests),
    )
    for request in requests:
        metrics.merge(request.counters)
        metrics.accepted_per_round += request.accepted_per_round
        metrics.drafted_per_round += request.drafted_per_round
    return metrics
