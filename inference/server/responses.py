"""Writes the engine's outputs as answers of the API, whole or chunk by chunk."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from inference.metrics import acceptance_length
from inference.outputs import CompletionOutput, Logprob, RequestOutput
from inference.requests.detokenizer import Detokenizer
from inference.sampling_params import SamplingParams
from inference.server.api import schema
from inference.server.api.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequest,
)
from inference.server.async_engine import Generation
from inference.server.options import ServerOptions
from speculators.errors import ConfigError
from speculators.vocab.token_bytes import token_bytes

LEAST_LOGPROB = -9999.0  # for tokens of probability 0: JSON has no infinity


class TokenTexts:
    """Texts of single tokens, as log-probabilities and rounds show them."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    @cached_property
    def _bytes(self) -> dict[int, bytes]:
        try:
            return token_bytes(self.tokenizer, "the tokenizer").text
        except (
            ConfigError
        ):  # its tokens have no bytes of their own, only a text that depends on their neighbours
            return {}

    def text(self, token: int, entry: Logprob | None, as_id: bool) -> str:
        if as_id:
            return f"token_id:{token}"
        decoded = entry.decoded_token if entry is not None else None
        return self.tokenizer.decode([token]) if decoded is None else decoded

    def alone(self, token: int) -> str:
        """The text with its leading space, which decoders drop at the beginning of a text."""
        known = self._bytes.get(token)
        return self.tokenizer.decode([token]) if known is None else known.decode("utf-8", "replace")

    def top(self, token: int, entry: Logprob, as_id: bool) -> schema.TopLogprob:
        text = self.text(token, entry, as_id)
        own = self._bytes.get(token, text.encode())
        return schema.TopLogprob(token=text, logprob=_finite(entry.logprob), bytes=list(own))


class RoundTexts:
    """Rounds of one response with their texts. The texts of committed tokens concatenate to the
    response's: a token that ends within a character has none, and the one that completes the
    character has all of it. (Stop strings and stop tokens are among them, and not in the
    response.)"""

    def __init__(
        self, texts: TokenTexts, prompt_token_ids: Sequence[int], skip_special_tokens: bool
    ) -> None:
        self._texts = texts
        params = SamplingParams(skip_special_tokens=skip_special_tokens)
        self._detokenizer = Detokenizer(texts.tokenizer, prompt_token_ids, params)

    def rounds(self, completion: CompletionOutput) -> list[schema.Round]:
        rounds = [
            schema.Round(
                tokens=[self._committed(*placed) for placed in judged.tokens],
                rejected=[
                    schema.RoundToken(
                        token_id=token, text=self._texts.alone(token), position=position
                    )
                    for token, position in judged.rejected
                ],
                num_draft_tokens=judged.num_draft_tokens,
            )
            for judged in completion.rounds or ()
        ]
        if completion.finish_reason is not None and rounds:
            self._detokenizer.finish()
            rounds[-1].tokens[-1].text += self._detokenizer.take()
        return rounds

    def _committed(self, token: int, position: int | None) -> schema.RoundToken:
        self._detokenizer.push([token])
        return schema.RoundToken(token_id=token, text=self._detokenizer.take(), position=position)


class Writer:
    """Writes the answer to one request. `base`: id, time and model of the answer. `generations` are
    read for metrics once they are finished. `num_spec_tokens`: of the drafter; None without one."""

    chunk_class: type[schema.Answer]  # of a stream

    def __init__(
        self,
        request: GenerationRequest,
        base: Mapping[str, Any],
        options: ServerOptions,
        texts: TokenTexts,
        generations: Sequence[Generation],
        num_spec_tokens: int | None,
    ) -> None:
        self._base, self._options, self._texts, self._generations = (
            base,
            options,
            texts,
            generations,
        )
        self._num_spec_tokens = num_spec_tokens
        self._n = request.n or 1
        self._spec_decode_detail = (
            request.per_request_spec_decode_metrics or options.per_request_spec_decode_metrics
        )
        self._as_id, self._with_ids = (
            bool(request.return_tokens_as_token_ids),
            bool(request.return_token_ids),
        )
        self._with_prompt_logprobs = request.prompt_logprobs is not None
        stream_options = request.stream_options
        self._usage_in_chunks = bool(stream_options and stream_options.continuous_usage_stats)
        self._usage_at_end = (
            bool(stream_options and stream_options.include_usage)
            or options.enable_force_include_usage
        )
        self._begun: set[int] = set()  # indices of choices
        self._rounds: dict[int, RoundTexts] = {}  # by index of the choice
        self._completion_tokens = 0
        self._cached_tokens: int | None = None

    def whole(self, outputs: Sequence[RequestOutput]) -> schema.Answer:
        raise NotImplementedError

    def chunks(self, prompt: int, output: RequestOutput) -> Iterator[schema.Answer]:
        """Chunks for a delta of the prompt with this index."""
        raise NotImplementedError

    def last(self) -> Iterator[schema.Answer]:
        """A chunk without choices, if metrics or usage are due at the end."""
        metrics = self._metrics()
        fields: dict[str, Any] = {} if metrics is None else {"metrics": metrics}
        if self._usage_at_end:
            fields["usage"] = self._usage()
        if fields:
            yield self._chunk([], **fields)

    def _chunk(self, choices: list[Any], **fields: Any) -> Any:
        kind = self.chunk_class
        return kind(
            **self._base, object=kind.model_fields["object"].default, choices=choices, **fields
        )

    def _usage(self) -> schema.Usage:
        prompt_tokens = sum(len(generation.prompt.token_ids) for generation in self._generations)
        usage = schema.Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=self._completion_tokens,
            total_tokens=prompt_tokens + self._completion_tokens,
        )
        if self._options.enable_prompt_tokens_details and self._cached_tokens is not None:
            usage.prompt_tokens_details = schema.PromptTokensDetails(
                cached_tokens=self._cached_tokens
            )
        return usage

    def _chunk_usage(self) -> dict[str, Any]:
        """The field `usage` of a chunk with choices: null if the usage comes in the last chunk, as
        OpenAI has it."""
        if self._usage_in_chunks:
            return {"usage": self._usage()}
        return {"usage": None} if self._usage_at_end else {}

    def _count(self, output: RequestOutput, completion: CompletionOutput) -> None:
        self._completion_tokens += len(completion.token_ids)
        self._cached_tokens = output.num_cached_tokens

    def _metrics(self) -> schema.PerRequestMetrics | None:
        """Metrics of a single response; of several there are none (as in vLLM)."""
        times = self._options.enable_per_request_metrics
        acceptance = self._spec_decode_detail != "none" and self._num_spec_tokens is not None
        if not (times or acceptance) or self._n != 1 or len(self._generations) != 1:
            return None
        metrics = _times(self._generations[0]) if times else schema.PerRequestMetrics()
        if acceptance:
            metrics.speculative_decoding = self._acceptance(self._generations[0])
        return metrics

    def _acceptance(self, generation: Generation) -> schema.SpeculativeDecodingMetrics:
        assert generation.response is not None and self._num_spec_tokens is not None
        request = generation.response.requests[0]
        most = min(self._num_spec_tokens, request.most_drafts)
        rounds = zip(request.drafted_per_round, request.accepted_per_round, strict=True)
        steps = [(drafted, accepted) for drafted, accepted in rounds if drafted]
        accepted = [count for _, count in steps]
        counters, detailed = request.counters, self._spec_decode_detail == "detailed"
        return schema.SpeculativeDecodingMetrics(
            mean_acceptance_length=acceptance_length(
                counters.num_accepted_tokens, counters.num_drafts
            ),
            draft_acceptance_rate=counters.num_accepted_tokens / max(counters.num_draft_tokens, 1),
            acceptance_histogram=[accepted.count(j) for j in range(max(most, *accepted, 0) + 1)],
            num_spec_steps=counters.num_drafts,
            num_accepted_draft_tokens=counters.num_accepted_tokens,
            num_draft_tokens=counters.num_draft_tokens,
            num_spec_tokens=most,
            per_step_accepted=accepted if detailed else None,
            per_step_drafted=[drafted for drafted, _ in steps] if detailed else None,
        )

    def _choice_fields(
        self, prompt: int, index: int, completion: CompletionOutput
    ) -> dict[str, Any]:
        """Fields of a streamed choice that are left out unless the request or the response has
        them."""
        fields: dict[str, Any] = {}
        if completion.stop_reason is not None:
            fields["stop_reason"] = completion.stop_reason
        if self._with_ids:
            fields["token_ids"] = list(completion.token_ids)
        if completion.rounds is not None:
            if index not in self._rounds:
                generation = self._generations[prompt]
                skip = generation.params.skip_special_tokens
                self._rounds[index] = RoundTexts(self._texts, generation.prompt.token_ids, skip)
            fields["rounds"] = self._rounds[index].rounds(completion)
        return fields


class CompletionWriter(Writer):
    """Answers of /v1/completions."""

    chunk_class = schema.CompletionResponse

    def __init__(self, request: CompletionRequest, *parts: Any) -> None:
        super().__init__(request, *parts)
        self._echo, self._prompt_only = bool(request.echo), request.max_tokens == 0
        self._with_logprobs = request.logprobs is not None
        self._offsets: dict[int, int] = {}  # characters written of each choice

    def whole(self, outputs: Sequence[RequestOutput]) -> schema.CompletionResponse:
        choices = [
            self._choice(i, output, part)
            for i, output in enumerate(outputs)
            for part in output.outputs
        ]
        return self._chunk(choices, usage=self._usage(), metrics=self._metrics())

    def chunks(self, prompt: int, output: RequestOutput) -> Iterator[schema.CompletionResponse]:
        for completion in output.outputs:
            choice = self._choice(prompt, output, completion)
            if (
                choice.text
                or choice.finish_reason
                or choice.logprobs
                or choice.token_ids
                or choice.rounds
            ):
                yield self._chunk([choice], **self._chunk_usage())

    def _choice(
        self, prompt: int, output: RequestOutput, completion: CompletionOutput
    ) -> schema.CompletionChoice:
        index = prompt * self._n + completion.index
        first, given = index not in self._begun, self._generations[prompt].prompt
        self._begun.add(index)
        logprobs: list[Any] = list(completion.logprobs or ())
        if self._prompt_only:  # one token was generated, and none was asked for
            completion.text, completion.token_ids, completion.rounds, logprobs = "", [], None, []
        self._count(output, completion)
        text, shown = completion.text, list(completion.token_ids)
        if self._echo and first:
            text = (
                self._texts.tokenizer.decode(given.token_ids) if given.text is None else given.text
            ) + text
            shown = given.token_ids + shown
            logprobs = [*(output.prompt_logprobs or ()), *logprobs]
        fields = self._choice_fields(prompt, index, completion)
        if self._with_ids and first:
            fields["prompt_token_ids"] = given.token_ids
        if self._with_prompt_logprobs:
            fields["prompt_logprobs"] = _prompt_logprobs(output)
        written = self._logprobs(index, shown, logprobs) if self._with_logprobs and shown else None
        self._offsets[index] = self._offsets.get(index, 0) + len(text)
        return schema.CompletionChoice(
            index=index,
            text=text,
            logprobs=written,
            finish_reason=completion.finish_reason,
            **fields,
        )

    def _logprobs(
        self, index: int, token_ids: Sequence[int], entries: Sequence[Any]
    ) -> schema.CompletionLogprobs:
        """Log-probabilities in the shape of completions. The first token of a prompt has none."""
        pairs = list(zip(token_ids, entries, strict=True))
        texts = [
            self._texts.text(token, entry and entry[token], self._as_id) for token, entry in pairs
        ]
        start = self._offsets.get(index, 0)
        return schema.CompletionLogprobs(
            tokens=texts,
            text_offset=[start, *itertools.accumulate(map(len, texts), initial=start)][1:-1],
            token_logprobs=[entry and _finite(entry[token].logprob) for token, entry in pairs],
            top_logprobs=[
                entry
                and {
                    self._texts.text(t, top, self._as_id): _finite(top.logprob)
                    for t, top in entry.items()
                }
                for entry in entries
            ],
        )


class ChatWriter(Writer):
    """Answers of /v1/chat/completions."""

    chunk_class = schema.ChatCompletionChunk

    def __init__(self, request: ChatCompletionRequest, *parts: Any) -> None:
        super().__init__(request, *parts)
        self._top_logprobs = request.top_logprobs or 0
        last = request.messages[-1]
        self._role = self._options.response_role if request.add_generation_prompt else last.role
        self._echoed = last.content if request.echo and isinstance(last.content, str) else ""

    def whole(self, outputs: Sequence[RequestOutput]) -> schema.ChatCompletionResponse:
        (output,) = outputs
        choices = []
        for completion in output.outputs:
            self._count(output, completion)
            choices.append(
                schema.ChatChoice(
                    index=completion.index,
                    message=schema.ChatMessage(
                        role=self._role, content=self._echoed + completion.text
                    ),
                    logprobs=self._logprobs(completion),
                    finish_reason=completion.finish_reason,
                    stop_reason=completion.stop_reason,
                    token_ids=completion.token_ids if self._with_ids else None,
                )
            )
        return schema.ChatCompletionResponse(
            **self._base,
            object="chat.completion",
            choices=choices,
            usage=self._usage(),
            metrics=self._metrics(),
            prompt_token_ids=output.prompt_token_ids if self._with_ids else None,
            prompt_logprobs=_prompt_logprobs(output) if self._with_prompt_logprobs else None,
        )

    def chunks(self, prompt: int, output: RequestOutput) -> Iterator[schema.ChatCompletionChunk]:
        for completion in output.outputs:
            index, reason = completion.index, completion.finish_reason
            if index not in self._begun:
                self._begun.add(index)
                ids = {"prompt_token_ids": output.prompt_token_ids} if self._with_ids else {}
                delta = schema.ChatDelta(role=self._role, content=self._echoed)
                choice = schema.ChatChunkChoice(
                    index=index, delta=delta, logprobs=None, finish_reason=None
                )
                yield self._chunk([choice], **ids, **self._chunk_usage())
            self._count(output, completion)
            fields = self._choice_fields(prompt, index, completion)
            fields |= {
                "logprobs": self._logprobs(completion) if completion.token_ids else None,
                "finish_reason": reason,
            }
            if any((completion.text, *fields.values())):
                choice = schema.ChatChunkChoice(
                    index=index, delta=schema.ChatDelta(content=completion.text), **fields
                )
                yield self._chunk([choice], **self._chunk_usage())

    def _logprobs(self, completion: CompletionOutput) -> schema.ChatLogprobs | None:
        if completion.logprobs is None:
            return None
        content = []
        for token, entries in zip(completion.token_ids, completion.logprobs, strict=True):
            best = sorted(entries.items(), key=lambda item: -item[1].logprob)
            best = best if self._top_logprobs < 0 else best[: self._top_logprobs]
            own = self._texts.top(token, entries[token], self._as_id)
            top = [self._texts.top(other, entry, self._as_id) for other, entry in best]
            content.append(schema.TokenLogprob(**own.model_dump(), top_logprobs=top))
        return schema.ChatLogprobs(content=content)


def _times(generation: Generation) -> schema.PerRequestMetrics:
    assert generation.response is not None
    request, scheduled = generation.response.requests[0], generation.scheduled[0]
    first, end, written = request.first_token_time, request.finished_time, generation.num_written[0]
    if first is None or end is None:
        return schema.PerRequestMetrics()
    return schema.PerRequestMetrics(
        time_to_first_token_ms=1e3 * (first - scheduled),
        generation_time_ms=1e3 * (end - first),
        queue_time_ms=1e3 * (scheduled - request.arrival_time),
        mean_itl_ms=1e3 * (end - first) / (written - 1) if written > 1 else None,
        tokens_per_second=written / (end - scheduled) if end > scheduled else None,
    )


def _prompt_logprobs(output: RequestOutput) -> schema.PromptLogprobs:
    def entry(logprob: Logprob) -> schema.PromptLogprob:
        value = _finite(logprob.logprob)
        return schema.PromptLogprob(
            logprob=value, rank=logprob.rank, decoded_token=logprob.decoded_token
        )

    places = output.prompt_logprobs or ()
    return [
        None if p is None else {str(token): entry(logprob) for token, logprob in p.items()}
        for p in places
    ]


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)
