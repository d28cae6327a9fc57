"""Outputs of the engine as clients read them: whole, or chunk by chunk. Knows the protocol and no engine."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from inference.metrics import acceptance_length
from inference.outputs import CompletionOutput, Logprob, RequestOutput
from inference.server.api.protocol import ChatCompletionRequest, CompletionRequest, GenerationRequest
from inference.server.api.protocol_responses import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletionChunk,
    ChatCompletionResponse,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    CompletionChoice,
    CompletionLogprobs,
    CompletionResponse,
    PerRequestMetrics,
    PromptLogprob,
    PromptLogprobs,
    PromptTokensDetails,
    Round,
    SpeculativeDecodingMetrics,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from inference.server.async_engine import Generation
from inference.server.options import ServerOptions
from inference.server.rounds import RoundTexts
from speculators.errors import ConfigError
from speculators.vocab.token_bytes import surfaces

LEAST_LOGPROB = -9999.0  # of a token that cannot be: JSON has no infinity


class TokenTexts:
    """Tokens as logprobs show them."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    @cached_property
    def _bytes(self) -> dict[int, bytes]:
        try:
            return surfaces(self.tokenizer, "the tokenizer").text
        except ConfigError:  # one whose tokens depend on their neighbours: their text is all there is
            return {}

    def text(self, token: int, entry: Logprob | None, as_id: bool) -> str:
        if as_id:
            return f"token_id:{token}"
        known = entry.decoded_token if entry is not None else None
        return self.tokenizer.decode([token]) if known is None else known

    def alone(self, token: int) -> str:
        """With the space it may begin with, which decoders leave out at the beginning of a text."""
        known = self._bytes.get(token)
        return self.tokenizer.decode([token]) if known is None else known.decode("utf-8", "replace")

    def top(self, token: int, entry: Logprob, as_id: bool) -> TopLogprob:
        text = self.text(token, entry, as_id)
        written = self._bytes.get(token, text.encode())
        return TopLogprob(token=text, logprob=_finite(entry.logprob), bytes=list(written))


class _Writer:
    """One request's answer. `generations`: for the metrics in it, once they are finished."""

    def __init__(
        self, request: GenerationRequest, base: Mapping[str, Any], options: ServerOptions, texts: TokenTexts,
        generations: Sequence[Generation], num_spec_tokens: int | None,
    ) -> None:  # fmt: skip
        self._base, self._options, self._texts, self._generations = base, options, texts, generations
        self._num_spec_tokens = num_spec_tokens
        self._n = request.n or 1
        self._detail = request.per_request_spec_decode_metrics or options.per_request_spec_decode_metrics
        self._as_id, self._with_ids = bool(request.return_tokens_as_token_ids), bool(request.return_token_ids)
        wanted = request.stream_options
        self._running_usage = bool(wanted and wanted.continuous_usage_stats)
        self._last_usage = bool(wanted and wanted.include_usage) or options.enable_force_include_usage
        self._began: set[int] = set()  # choices
        self._rounds: dict[int, RoundTexts] = {}  # by choice
        self._completion_tokens = 0
        self._cached_tokens: int | None = None

    def _usage(self) -> Usage:
        prompt_tokens = sum(len(each.prompt.token_ids) for each in self._generations)
        usage = Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=self._completion_tokens,
            total_tokens=prompt_tokens + self._completion_tokens,
        )
        if self._options.enable_prompt_tokens_details and self._cached_tokens is not None:
            usage.prompt_tokens_details = PromptTokensDetails(cached_tokens=self._cached_tokens)
        return usage

    def _usage_now(self) -> dict[str, Any]:
        """Of a chunk: with include_usage every chunk but the last says that there is none yet."""
        if self._running_usage:
            return {"usage": self._usage()}
        return {"usage": None} if self._last_usage else {}

    def _count(self, output: RequestOutput, completion: CompletionOutput) -> None:
        self._completion_tokens += len(completion.token_ids)
        self._cached_tokens = output.num_cached_tokens

    def _metrics(self) -> PerRequestMetrics | None:
        """They describe one response: of several there are none (as in vLLM)."""
        timed, drafting = self._options.enable_per_request_metrics, self._num_spec_tokens is not None
        told = self._detail != "none" and drafting
        if not (timed or told) or self._n != 1 or len(self._generations) != 1:
            return None
        metrics = _times(self._generations[0]) if timed else PerRequestMetrics()
        if told:
            metrics.speculative_decoding = self._acceptance(self._generations[0])
        return metrics

    def _acceptance(self, generation: Generation) -> SpeculativeDecodingMetrics:
        assert generation.answer is not None and self._num_spec_tokens is not None
        request = generation.answer.requests[0]
        most = min(self._num_spec_tokens, request.most_drafts)
        rounds = zip(request.drafted_per_round, request.accepted_per_round, strict=True)
        steps = [(drafted, accepted) for drafted, accepted in rounds if drafted]
        accepted = [each for _, each in steps]
        counters = request.counters
        return SpeculativeDecodingMetrics(
            mean_acceptance_length=acceptance_length(counters.num_accepted_tokens, counters.num_drafts),
            draft_acceptance_rate=counters.num_accepted_tokens / max(counters.num_draft_tokens, 1),
            acceptance_histogram=[accepted.count(j) for j in range(max(most, *accepted, 0) + 1)],
            num_spec_steps=counters.num_drafts,
            num_accepted_draft_tokens=counters.num_accepted_tokens,
            num_draft_tokens=counters.num_draft_tokens,
            num_spec_tokens=most,
            per_step_accepted=accepted if self._detail == "detailed" else None,
            per_step_drafted=[each for each, _ in steps] if self._detail == "detailed" else None,
        )

    def _rounds_of(self, prompt: int, choice: int, completion: CompletionOutput) -> dict[str, list[Round]]:
        """What became of the drafts, if somebody asked."""
        if completion.rounds is None:
            return {}
        if choice not in self._rounds:
            asked, texts = self._generations[prompt], self._texts
            tokens, skip = asked.prompt.token_ids, asked.params.skip_special_tokens
            self._rounds[choice] = RoundTexts(texts.tokenizer, texts.alone, tokens, skip)
        return {"rounds": self._rounds[choice].rounds(completion)}

    def _chat_logprobs(self, completion: CompletionOutput, count: int) -> ChatLogprobs | None:
        if completion.logprobs is None:
            return None
        content = []
        for token, entries in zip(completion.token_ids, completion.logprobs, strict=True):
            own = self._texts.top(token, entries[token], self._as_id)
            best = sorted(entries.items(), key=lambda each: -each[1].logprob)
            top = [
                self._texts.top(other, entry, self._as_id) for other, entry in best[: len(best) if count < 0 else count]
            ]
            content.append(TokenLogprob(**own.model_dump(), top_logprobs=top))
        return ChatLogprobs(content=content)


class CompletionWriter(_Writer):
    """Answers of /v1/completions."""

    def __init__(self, request: CompletionRequest, *parts: Any) -> None:
        super().__init__(request, *parts)
        self._echo, self._prompt_only = bool(request.echo), request.max_tokens == 0
        self._logprobs, self._prompt_logprobs = request.logprobs is not None, request.prompt_logprobs is not None
        self._offsets: dict[int, int] = {}  # characters written of each choice

    def whole(self, outputs: Sequence[RequestOutput]) -> CompletionResponse:
        choices = [self._choice(i, output, each) for i, output in enumerate(outputs) for each in output.outputs]
        return CompletionResponse(
            **self._base, object="text_completion", choices=choices, usage=self._usage(), metrics=self._metrics()
        )

    def chunks(self, prompt: int, output: RequestOutput) -> Iterator[CompletionResponse]:
        for completion in output.outputs:
            choice = self._choice(prompt, output, completion)
            if choice.text or choice.finish_reason or choice.logprobs or choice.token_ids or choice.rounds:
                yield CompletionResponse(**self._base, object="text_completion", choices=[choice], **self._usage_now())

    def last(self) -> Iterator[CompletionResponse]:
        metrics = self._metrics()
        extra: dict[str, Any] = {} if metrics is None else {"metrics": metrics}
        if self._last_usage:
            extra["usage"] = self._usage()
        if extra:
            yield CompletionResponse(**self._base, object="text_completion", choices=[], **extra)

    def _choice(self, prompt: int, output: RequestOutput, completion: CompletionOutput) -> CompletionChoice:
        index = prompt * self._n + completion.index
        first, asked = index not in self._began, self._generations[prompt].prompt
        self._began.add(index)
        text, token_ids = completion.text, list(completion.token_ids)
        logprobs: list[Any] = list(completion.logprobs or ())
        if self._prompt_only:
            text, token_ids, logprobs = "", [], []
            completion.token_ids, completion.rounds = [], None
        self._count(output, completion)
        shown = token_ids
        if self._echo and first:
            before = self._texts.tokenizer.decode(asked.token_ids) if asked.text is None else asked.text
            text, shown = before + text, asked.token_ids + token_ids
            logprobs = [*(output.prompt_logprobs or ()), *logprobs]
        fields: dict[str, Any] = {"stop_reason": completion.stop_reason} if completion.stop_reason is not None else {}
        fields |= self._rounds_of(prompt, index, completion)
        if self._with_ids:
            fields |= {"token_ids": token_ids} | ({"prompt_token_ids": asked.token_ids} if first else {})
        if self._prompt_logprobs:
            fields["prompt_logprobs"] = _prompt_logprobs(output)
        written = self._legacy(index, shown, logprobs) if self._logprobs and shown else None
        self._offsets[index] = self._offsets.get(index, 0) + len(text)
        return CompletionChoice(
            index=index, text=text, logprobs=written, finish_reason=completion.finish_reason, **fields
        )

    def _legacy(self, index: int, token_ids: Sequence[int], entries: Sequence[Any]) -> CompletionLogprobs:
        """logprobs in the shape of completions. The first token of a prompt has none."""
        texts = [self._texts.text(t, each and each[t], self._as_id) for t, each in zip(token_ids, entries, strict=True)]
        start = self._offsets.get(index, 0)
        return CompletionLogprobs(
            tokens=texts,
            text_offset=[start, *itertools.accumulate(map(len, texts), initial=start)][1:-1],
            token_logprobs=[
                each and _finite(each[token].logprob) for token, each in zip(token_ids, entries, strict=True)
            ],
            top_logprobs=[
                each and {self._texts.text(t, entry, self._as_id): _finite(entry.logprob) for t, entry in each.items()}
                for each in entries
            ],
        )


class ChatWriter(_Writer):
    """Answers of /v1/chat/completions."""

    def __init__(self, request: ChatCompletionRequest, *parts: Any) -> None:
        super().__init__(request, *parts)
        self._top, self._prompt_logprobs = request.top_logprobs or 0, request.prompt_logprobs is not None
        last = request.messages[-1]
        self._role = self._options.response_role if request.add_generation_prompt else last.role
        self._before = last.content if request.echo and isinstance(last.content, str) else ""

    def whole(self, outputs: Sequence[RequestOutput]) -> ChatCompletionResponse:
        (output,) = outputs
        choices = []
        for each in output.outputs:
            self._count(output, each)
            choices.append(
                ChatChoice(
                    index=each.index,
                    message=ChatMessage(role=self._role, content=self._before + each.text),
                    logprobs=self._chat_logprobs(each, self._top),
                    finish_reason=each.finish_reason,
                    stop_reason=each.stop_reason,
                    token_ids=each.token_ids if self._with_ids else None,
                )
            )
        return ChatCompletionResponse(
            **self._base, object="chat.completion", choices=choices, usage=self._usage(), metrics=self._metrics(),
            prompt_token_ids=output.prompt_token_ids if self._with_ids else None,
            prompt_logprobs=_prompt_logprobs(output) if self._prompt_logprobs else None,
        )  # fmt: skip

    def chunks(self, prompt: int, output: RequestOutput) -> Iterator[ChatCompletionChunk]:
        for each in output.outputs:
            if each.index not in self._began:
                self._began.add(each.index)
                delta = ChatDelta(role=self._role, content=self._before)
                ids = {"prompt_token_ids": output.prompt_token_ids} if self._with_ids else {}
                yield self._chunk(
                    ChatChunkChoice(index=each.index, delta=delta, logprobs=None, finish_reason=None), **ids
                )
            self._count(output, each)
            logprobs = self._chat_logprobs(each, self._top) if each.token_ids else None
            if each.text or each.finish_reason or logprobs or each.rounds or (self._with_ids and each.token_ids):
                extra: dict[str, Any] = {"token_ids": each.token_ids} if self._with_ids else {}
                if each.stop_reason is not None:
                    extra["stop_reason"] = each.stop_reason
                extra |= self._rounds_of(prompt, each.index, each)
                yield self._chunk(
                    ChatChunkChoice(
                        index=each.index, delta=ChatDelta(content=each.text), logprobs=logprobs,
                        finish_reason=each.finish_reason, **extra,
                    )
                )  # fmt: skip

    def last(self) -> Iterator[ChatCompletionChunk]:
        metrics = self._metrics()
        extra: dict[str, Any] = {} if metrics is None else {"metrics": metrics}
        if self._last_usage:
            extra["usage"] = self._usage()
        if extra:
            yield ChatCompletionChunk(**self._base, object="chat.completion.chunk", choices=[], **extra)

    def _chunk(self, choice: ChatChunkChoice, **fields: Any) -> ChatCompletionChunk:
        fields |= self._usage_now()
        return ChatCompletionChunk(**self._base, object="chat.completion.chunk", choices=[choice], **fields)


def _times(generation: Generation) -> PerRequestMetrics:
    assert generation.answer is not None
    request, scheduled = generation.answer.requests[0], generation.scheduled[0]
    first, end, written = request.first_token_time, request.finished_time, generation.written[0]
    if first is None or end is None:
        return PerRequestMetrics()
    return PerRequestMetrics(
        time_to_first_token_ms=1e3 * (first - scheduled),
        generation_time_ms=1e3 * (end - first),
        queue_time_ms=1e3 * (scheduled - request.arrival_time),
        mean_itl_ms=1e3 * (end - first) / (written - 1) if written > 1 else None,
        tokens_per_second=written / (end - scheduled) if end > scheduled else None,
    )


def _prompt_logprobs(output: RequestOutput) -> PromptLogprobs:
    def told(entry: Logprob) -> PromptLogprob:
        return PromptLogprob(logprob=_finite(entry.logprob), rank=entry.rank, decoded_token=entry.decoded_token)

    places = output.prompt_logprobs or ()
    return [None if each is None else {str(token): told(e) for token, e in each.items()} for each in places]


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)
