"""Writes the engine's outputs as answers of the API, whole or chunk by chunk."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from inference.metrics import acceptance_length
from inference.outputs import CompletionOutput, Logprob, RequestOutput
from inference.requests.detokenizer import Detokenizer
from inference.requests.request import Request
from inference.sampling_params import SamplingParams
from inference.server.engine_loop import Generation
from inference.server.protocol import ChatCompletionRequest, CompletionRequest
from speculators.errors import ConfigError
from speculators.vocab.token_bytes import token_bytes

LEAST_LOGPROB = -9999.0  # for tokens of probability 0: JSON has no infinity

Answer = dict[str, Any]


class TokenTexts:
    """Texts of single tokens, as log-probabilities and rounds show them."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    @cached_property
    def bytes_of(self) -> dict[int, bytes]:
        try:
            return token_bytes(self.tokenizer, "the tokenizer").text
        except ConfigError:  # its tokens have no bytes of their own, only a text among neighbours
            return {}

    def text(self, token: int, entry: Logprob | None) -> str:
        decoded = entry.decoded_token if entry is not None else None
        return self.tokenizer.decode([token]) if decoded is None else decoded

    def alone(self, token: int) -> str:
        """The text with its leading space, which decoders drop at the beginning of a text."""
        known = self.bytes_of.get(token)
        return self.tokenizer.decode([token]) if known is None else known.decode("utf-8", "replace")


class RoundTexts:
    """Rounds of one response with their texts: committed tokens (accepted drafts with their
    position in the proposal from 0, then the target's own with none), and rejected drafts.

    The texts of committed tokens concatenate to the response's: a token that ends within a
    character has none, and the one that completes the character has all of it. (Stop strings and
    stop tokens are among them, and not in the response.)"""

    def __init__(self, texts: TokenTexts, generation: Generation) -> None:
        self._texts = texts
        params = SamplingParams(skip_special_tokens=generation.params.skip_special_tokens)
        prompt = generation.prompt.token_ids
        self._detokenizer = Detokenizer(texts.tokenizer, prompt, params)

    def rounds(self, completion: CompletionOutput) -> list[Answer]:
        rounds: list[Answer] = [
            {
                "tokens": [self._committed(*placed) for placed in judged.tokens],
                "rejected": [
                    {"token_id": token, "text": self._texts.alone(token), "position": position}
                    for token, position in judged.rejected
                ],
                "num_draft_tokens": judged.num_draft_tokens,
            }
            for judged in completion.rounds or ()
        ]
        if completion.finish_reason is not None and rounds:
            self._detokenizer.finish()
            rounds[-1]["tokens"][-1]["text"] += self._detokenizer.take()
        return rounds

    def _committed(self, token: int, position: int | None) -> Answer:
        self._detokenizer.push([token])
        return {"token_id": token, "text": self._detokenizer.take(), "position": position}


class Writer:
    """Writes the answer to one request. `base`: id, time and model of the answer. `generations` are
    read for metrics once they are finished. `num_spec_tokens`: of the drafter; None without one.
    `detail`: of the acceptance that is reported."""

    objects = ("text_completion", "text_completion")  # whole, and chunks of a stream

    def __init__(
        self,
        request: Any,
        base: Mapping[str, Any],
        texts: TokenTexts,
        generations: Sequence[Generation],
        num_spec_tokens: int | None,
        detail: str,
    ) -> None:
        self.request, self.texts = request, texts
        self._base, self._generations = base, generations
        self._num_spec_tokens, self._detail = num_spec_tokens, detail
        options = request.stream_options
        self._usage_in_chunks = bool(options and options.continuous_usage_stats)
        self._usage_at_end = bool(options and options.include_usage)
        self._begun: set[int] = set()  # indices of choices
        self._rounds: dict[int, RoundTexts] = {}  # by index of the choice
        self._completion_tokens = 0

    def whole(self, outputs: Sequence[RequestOutput]) -> Answer:
        choices = [
            self.choice(prompt, output, completion)
            for prompt, output in enumerate(outputs)
            for completion in output.outputs
        ]
        answer = {**self._base, "object": self.objects[0], "choices": choices}
        return answer | {"usage": self._usage(), "metrics": self._metrics()}

    def chunks(self, prompt: int, output: RequestOutput) -> Iterator[Answer]:
        """Chunks for a delta of the prompt with this index."""
        for completion in output.outputs:
            choice = self.choice(prompt, output, completion)
            if completion.text or completion.token_ids or completion.finish_reason:
                yield self.chunk([choice])

    def last(self) -> Iterator[Answer]:
        """A chunk without choices, if metrics or usage are due at the end."""
        metrics = self._metrics()
        fields = {} if metrics is None else {"metrics": metrics}
        if self._usage_at_end:
            fields["usage"] = self._usage()
        if fields:
            yield {**self._base, "object": self.objects[1], "choices": [], **fields}

    def chunk(self, choices: list[Answer]) -> Answer:
        chunk = {**self._base, "object": self.objects[1], "choices": choices}
        if self._usage_in_chunks:
            chunk["usage"] = self._usage()
        elif self._usage_at_end:  # as OpenAI has it
            chunk["usage"] = None
        return chunk

    def choice(self, prompt: int, output: RequestOutput, completion: CompletionOutput) -> Answer:
        """A choice of a completion: in a stream with what is new."""
        index = prompt * (self.request.n or 1) + completion.index
        choice: Answer = {"index": index, "text": completion.text}
        choice |= self.ending(prompt, index, completion)
        if self.request.return_token_ids and index not in self._begun:
            choice["prompt_token_ids"] = output.prompt_token_ids
        self._begun.add(index)
        return choice

    def ending(self, prompt: int, index: int, completion: CompletionOutput) -> Answer:
        """The fields after the text that completions and chats have in common."""
        self._completion_tokens += len(completion.token_ids)
        fields: Answer = {
            "logprobs": None if completion.logprobs is None else self.logprobs(index, completion),
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
        }
        if self.request.return_token_ids:
            fields["token_ids"] = list(completion.token_ids)
        if completion.rounds is not None:
            if index not in self._rounds:
                self._rounds[index] = RoundTexts(self.texts, self._generations[prompt])
            fields["rounds"] = self._rounds[index].rounds(completion)
        return fields

    def logprobs(self, index: int, completion: CompletionOutput) -> Answer:
        raise NotImplementedError

    def _usage(self) -> Answer:
        prompt_tokens = sum(len(generation.prompt.token_ids) for generation in self._generations)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": self._completion_tokens,
            "total_tokens": prompt_tokens + self._completion_tokens,
        }

    def _metrics(self) -> Answer | None:
        """Acceptance of a single response; of several there is none (as in vLLM)."""
        single = len(self._generations) == 1 and (self.request.n or 1) == 1
        if self._detail == "none" or self._num_spec_tokens is None or not single:
            return None
        response = self._generations[0].response
        assert response is not None
        request = response.requests[0]
        most = min(self._num_spec_tokens, request.most_drafts)
        return {"speculative_decoding": acceptance(request, most, self._detail == "detailed")}


class CompletionWriter(Writer):
    """Answers of /v1/completions."""

    def __init__(self, request: CompletionRequest, *parts: Any) -> None:
        super().__init__(request, *parts)
        self._offsets: dict[int, int] = {}  # characters written of each choice

    def logprobs(self, index: int, completion: CompletionOutput) -> Answer:
        pairs = list(zip(completion.token_ids, completion.logprobs or (), strict=True))
        texts = [self.texts.text(token, entries[token]) for token, entries in pairs]
        start = self._offsets.get(index, 0)
        self._offsets[index] = start + len(completion.text)
        return {
            "tokens": texts,
            "text_offset": [start, *itertools.accumulate(map(len, texts), initial=start)][1:-1],
            "token_logprobs": [_finite(entries[token]) for token, entries in pairs],
            "top_logprobs": [
                {self.texts.text(token, top): _finite(top) for token, top in entries.items()}
                for _, entries in pairs
            ],
        }


class ChatWriter(Writer):
    """Answers of /v1/chat/completions."""

    objects = ("chat.completion", "chat.completion.chunk")

    def __init__(self, request: ChatCompletionRequest, *parts: Any) -> None:
        super().__init__(request, *parts)
        self._top_logprobs = request.top_logprobs or 0
        generates = request.add_generation_prompt and not request.continue_final_message
        self._role = "assistant" if generates else request.messages[-1].role

    def whole(self, outputs: Sequence[RequestOutput]) -> Answer:
        answer = super().whole(outputs)
        if self.request.return_token_ids:
            answer["prompt_token_ids"] = outputs[0].prompt_token_ids
        return answer

    def chunks(self, prompt: int, output: RequestOutput) -> Iterator[Answer]:
        for completion in output.outputs:
            index = completion.index
            if index not in self._begun:
                self._begun.add(index)
                delta = {"role": self._role, "content": ""}
                opening = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
                chunk = self.chunk([opening])
                if self.request.return_token_ids:
                    chunk["prompt_token_ids"] = output.prompt_token_ids
                yield chunk
            if completion.text or completion.token_ids or completion.finish_reason:
                choice = {"index": index, "delta": {"content": completion.text}}
                yield self.chunk([choice | self.ending(prompt, index, completion)])

    def choice(self, prompt: int, output: RequestOutput, completion: CompletionOutput) -> Answer:
        message = {"role": self._role, "content": completion.text, "refusal": None}
        choice = {"index": completion.index, "message": message}
        return choice | self.ending(prompt, completion.index, completion)

    def logprobs(self, index: int, completion: CompletionOutput) -> Answer:
        content = []
        for token, entries in zip(completion.token_ids, completion.logprobs or (), strict=True):
            best = sorted(entries.items(), key=lambda item: -item[1].logprob)
            best = best if self._top_logprobs < 0 else best[: self._top_logprobs]
            top = [self._token(other, entry) for other, entry in best]
            content.append(self._token(token, entries[token]) | {"top_logprobs": top})
        return {"content": content}

    def _token(self, token: int, entry: Logprob) -> Answer:
        text = self.texts.text(token, entry)
        own = self.texts.bytes_of.get(token, text.encode())
        return {"token": text, "logprob": _finite(entry), "bytes": list(own)}


def acceptance(request: Request, most: int, detailed: bool) -> Answer:
    """The acceptance of a response under vLLM's names. acceptance_histogram[j]: verifications that
    accepted j of at most `most` drafts; `detailed` adds an entry per verification."""
    counters = request.counters
    rounds = zip(request.drafted_per_round, request.accepted_per_round, strict=True)
    steps = [(drafted, accepted) for drafted, accepted in rounds if drafted]
    accepted = [count for _, count in steps]
    return {
        "mean_acceptance_length": acceptance_length(
            counters.num_accepted_tokens, counters.num_drafts
        ),
        "draft_acceptance_rate": counters.num_accepted_tokens / max(counters.num_draft_tokens, 1),
        "acceptance_histogram": [accepted.count(j) for j in range(max(most, *accepted, 0) + 1)],
        "num_spec_steps": counters.num_drafts,
        "num_accepted_draft_tokens": counters.num_accepted_tokens,
        "num_draft_tokens": counters.num_draft_tokens,
        "num_spec_tokens": most,
        "per_step_accepted": accepted if detailed else None,
        "per_step_drafted": [drafted for drafted, _ in steps] if detailed else None,
    }


def _finite(entry: Logprob) -> float:
    return max(entry.logprob, LEAST_LOGPROB)
