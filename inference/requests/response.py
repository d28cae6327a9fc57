"""Response: the n requests of one prompt, as the output the user sees, whole or in pieces."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from draftsmith.inference.outputs import (
    CompletionOutput,
    Logprob,
    RequestMetrics,
    RequestOutput,
    SampleLogprobs,
    TokenLogprobs,
)
from draftsmith.inference.requests.detokenizer import full_text
from draftsmith.inference.requests.request import Request


@dataclass(eq=False)
class Response:
    """`tokenizer`: None if no text is requested."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    requests: Sequence[Request]
    tokenizer: Any

    def __post_init__(self) -> None:
        self._sent = [0] * len(self.requests)  # output tokens already given out by `delta`
        self._ended = [False] * len(self.requests)

    @property
    def finished(self) -> bool:
        return all(request.finished for request in self.requests)

    def output(self) -> RequestOutput:
        """Everything there is."""
        completions = [
            _completion(r, _text(r, self.tokenizer), 0, self.tokenizer) for r in self.requests
        ]
        return self._output(completions)

    def delta(self) -> RequestOutput | None:
        """The text and tokens added since the last call; None if there are none. The end is
        reported exactly once."""
        new = []
        for i, request in enumerate(self.requests):
            written = len(request.token_ids) - request.num_prompt_tokens
            text = request.detokenizer.take() if request.detokenizer is not None else ""
            if written > self._sent[i] or text or request.finished > self._ended[i]:
                new.append(_completion(request, text, self._sent[i], self.tokenizer))
            self._sent[i] = written
            self._ended[i] = request.finished
        if not new:
            return None
        return self._output(new)

    def _output(self, completions: list[CompletionOutput]) -> RequestOutput:
        return RequestOutput(
            self.request_id,
            self.prompt,
            self.prompt_token_ids,
            completions,
            self.finished,
            _metrics(self.requests),
        )


def _completion(request: Request, text: str, start: int, tokenizer: Any) -> CompletionOutput:
    """With what was written from output token `start` on."""
    completion = CompletionOutput(
        request.index,
        text,
        request.token_ids[request.num_prompt_tokens + start :],
        request.finish_reason,
        request.stop_reason,
        copy.deepcopy(request.counters),
    )
    if request.params.logprobs is not None:
        completion.logprobs = as_dicts(request.logprobs[start:], tokenizer)
        completion.cumulative_logprob = sum(entry.logprobs[0] for entry in request.logprobs)
    return completion


def _text(request: Request, tokenizer: Any) -> str:
    if request.detokenizer is not None:
        return request.detokenizer.text
    if tokenizer is None:
        return ""
    return full_text(
        tokenizer,
        request.token_ids[: request.num_prompt_tokens],
        request.text_token_ids,
        request.params,
    )


def _metrics(requests: Sequence[Request]) -> RequestMetrics:
    first = [r.first_token_time for r in requests if r.first_token_time is not None]
    finished = [r.finished_time for r in requests if r.finished_time is not None]
    metrics = RequestMetrics(
        arrival_time=min(r.arrival_time for r in requests),
        first_token_time=min(first, default=None),
        finished_time=max(finished) if len(finished) == len(requests) else None,
    )
    for request in requests:
        metrics.merge(request.counters)
        metrics.accepted_per_round += request.accepted_per_round
        metrics.drafted_per_round += request.drafted_per_round
    return metrics


def as_dicts(entries: Sequence[TokenLogprobs], tokenizer: Any) -> SampleLogprobs:
    """As the user gets them: one dict per place, the token that stands there first."""
    return [dict(_named(entry, tokenizer)) for entry in entries]


def _named(entry: TokenLogprobs, tokenizer: Any) -> Iterator[tuple[int, Logprob]]:
    ranks = [entry.rank, *range(1, len(entry.token_ids))]
    for token, logprob, rank in zip(entry.token_ids, entry.logprobs, ranks, strict=True):
        yield (
            token,
            Logprob(logprob, rank, None if tokenizer is None else tokenizer.decode([token])),
        )
