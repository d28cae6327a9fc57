"""Response: the n requests of one prompt, as the output the user sees, whole or in pieces."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from inference.detokenizer import full_text
from inference.metrics import SpecDecodeCounters
from inference.outputs import CompletionOutput, RequestMetrics, RequestOutput
from inference.request import Request


class Response:
    def __init__(self, request_id: str, prompt: str | None, prompt_token_ids: list[int], requests: Sequence[Request]):
        self.request_id, self.prompt, self.prompt_token_ids = request_id, prompt, prompt_token_ids
        self.requests = requests
        self._sent = [0] * len(requests)  # output tokens already given out by `delta`
        self._ended = [False] * len(requests)

    @property
    def finished(self) -> bool:
        return all(request.finished for request in self.requests)

    def output(self, tokenizer: Any) -> RequestOutput:
        """Everything there is."""
        return self._output([_completion(r, _text(r, tokenizer), r.output_token_ids) for r in self.requests])

    def delta(self) -> RequestOutput | None:
        """What is new since the last call; None if nothing is. Every response's end is told exactly once."""
        new = []
        for i, request in enumerate(self.requests):
            token_ids = request.token_ids[request.num_prompt_tokens + self._sent[i] :]
            text = request.detokenizer.take() if request.detokenizer is not None else ""
            if token_ids or text or request.finished > self._ended[i]:
                new.append(_completion(request, text, token_ids))
            self._sent[i] += len(token_ids)
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
            self.requests[0].num_cached_tokens,
        )


def _completion(request: Request, text: str, token_ids: list[int]) -> CompletionOutput:
    return CompletionOutput(
        request.index, text, token_ids, request.finish_reason, request.stop_reason, copy.deepcopy(request.counters)
    )


def _text(request: Request, tokenizer: Any) -> str:
    if request.detokenizer is not None:
        return request.detokenizer.text
    if tokenizer is None:
        return ""
    return full_text(tokenizer, request.token_ids[: request.num_prompt_tokens], request.text_token_ids, request.params)


def _metrics(requests: Sequence[Request]) -> RequestMetrics:
    total, rounds = SpecDecodeCounters(), []
    for request in requests:
        total.merge(request.counters)
        rounds += request.accepted_per_round
    first = [r.first_token_time for r in requests if r.first_token_time is not None]
    finished = [r.finished_time for r in requests if r.finished_time is not None]
    return RequestMetrics(
        arrival_time=min(r.arrival_time for r in requests),
        first_token_time=min(first, default=None),
        finished_time=max(finished) if len(finished) == len(requests) else None,
        num_drafts=total.num_drafts,
        num_draft_tokens=total.num_draft_tokens,
        num_accepted_tokens=total.num_accepted_tokens,
        num_accepted_tokens_per_pos=list(total.num_accepted_tokens_per_pos),
        accepted_per_round=rounds,
    )
