"""Writes the engine's outputs as answers of the API: whole, or as a stream of server-sent
events."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import math
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeVar

from starlette.responses import JSONResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

from draftsmith.inference.entrypoints.text_generator import TextGenerator
from draftsmith.inference.metrics import acceptance_length
from draftsmith.inference.outputs import CompletionOutput, Logprob, RequestOutput
from draftsmith.inference.requests.detokenizer import Detokenizer
from draftsmith.inference.requests.request import Request
from draftsmith.inference.requests.response import decode_logprobs
from draftsmith.inference.sampling_params import SamplingParams
from draftsmith.inference.server.api_errors import SHUTTING_DOWN, APIError, error_json, fault
from draftsmith.inference.server.engine_thread import Ticket
from draftsmith.inference.server.protocol import ChatRequest, GenerationRequest
from draftsmith.speculators.errors import ConfigError
from draftsmith.speculators.vocab.token_bytes import token_bytes

logger = logging.getLogger(__name__)

REPLACEMENT = "\ufffd"  # what a decoder writes for a part of a character
DONE = "data: [DONE]\n\n"  # the end of a stream
LEAST_LOGPROB = -9999.0  # for tokens of probability 0: JSON has no infinity

Answer = dict[str, Any]
R = TypeVar("R")
InWorker = Callable[[Callable[[], R]], Awaitable[R]]  # calls something in a worker thread


class CompletionWriter:
    """Writes the answer to one request of /v1/completions, as its ticket brings the outputs.
    `base`: id, time and model of the answer. `detail`: of the acceptance. `in_worker`: calls what
    takes long outside of the event loop."""

    id_prefix = "cmpl"
    whole_object = "text_completion"  # what OpenAI's API calls a whole answer
    chunk_object = "text_completion"  # and an event of a stream

    def __init__(
        self,
        request: GenerationRequest,
        base: Mapping[str, Any],
        llm: TextGenerator,
        ticket: Ticket,
        detail: str,
        in_worker: InWorker[Any],
    ) -> None:
        self.request = request
        self.tokenizer = llm.get_tokenizer()
        self.ticket = ticket
        self._base = base
        self._detail = detail
        self._in_worker = in_worker
        self._begun: set[int] = set()  # indices of choices
        self._rounds: dict[int, RoundTexts] = {}  # by index of the choice
        self._offsets: dict[int, int] = {}  # where the next token of each choice begins
        self._written = Counter[int]()  # tokens of each choice

    async def response(self) -> JSONResponse:
        """The whole answer, once all outputs are there. APIError if one could not be finished."""
        outputs = {index: output async for index, output in self.ticket.outputs()}
        in_order = [outputs[index] for index in range(len(outputs))]
        return await self._in_worker(lambda: JSONResponse(self.whole(in_order)))

    async def events(self) -> AsyncIterator[str]:
        """The answer as server-sent events. Errors after the first one are events too."""
        try:
            async for index, output in self.ticket.outputs():
                for event in await self._events_of(index, output):
                    yield event
            for chunk in self.last_chunks():
                yield f"data: {json.dumps(chunk)}\n\n"
        except Exception as error:
            logger.error("a stream was ended", exc_info=error)
            yield f"data: {error_json(fault(error))}\n\n"
        yield DONE

    async def _events_of(self, prompt: int, output: RequestOutput) -> list[str]:
        """The events of a delta. Log-probabilities are texts of many tokens, and take long."""

        def write() -> list[str]:
            return [f"data: {json.dumps(chunk)}\n\n" for chunk in self.chunks(prompt, output)]

        has_logprobs = any(completion.logprobs is not None for completion in output.outputs)
        return await self._in_worker(write) if has_logprobs else write()

    def whole(self, outputs: Sequence[RequestOutput]) -> Answer:
        """The answer that is no stream. `outputs`: one for each prompt, finished."""
        choices = [
            self.choice(prompt, output, completion)
            for prompt, output in enumerate(outputs)
            for completion in output.outputs
        ]
        answer = {**self._base, "object": self.whole_object, "choices": choices}
        return answer | {"usage": self._usage(), "metrics": self._metrics()}

    def chunks(self, prompt: int, output: RequestOutput) -> Iterator[Answer]:
        """Chunks for a delta of the prompt with this index."""
        for completion in output.outputs:
            choice = self.choice(prompt, output, completion)
            yield self.chunk([choice], self._usage_so_far(output, choice["index"]))

    def last_chunks(self) -> Iterator[Answer]:
        """A chunk without choices, if metrics or usage are due at the end."""
        metrics = self._metrics()
        if metrics is not None or self.request.usage_at_end:
            fields = {} if metrics is None else {"metrics": metrics}
            if self.request.usage_at_end:
                fields["usage"] = self._usage()
            yield self.chunk([]) | fields

    def chunk(self, choices: list[Answer], usage: Answer | None = None) -> Answer:
        """A chunk of a stream. `usage`: None where it counts nothing."""
        fields = {"usage": usage} if self.request.usage_at_end else {}  # None is as OpenAI has it
        return {**self._base, "object": self.chunk_object, "choices": choices, **fields}

    def choice(self, prompt: int, output: RequestOutput, completion: CompletionOutput) -> Answer:
        """A choice: in a stream with what is new. The n responses of a prompt are choices one after
        the other."""
        index = prompt * len(self.ticket.begun[prompt].requests) + completion.index
        choice = {"index": index, "text": completion.text}
        choice |= self.common_fields(prompt, index, completion)
        if self.request.return_token_ids and index not in self._begun:
            choice["prompt_token_ids"] = output.prompt_token_ids
        self._begun.add(index)
        return choice

    def common_fields(self, prompt: int, index: int, completion: CompletionOutput) -> Answer:
        """The fields after the text that completions and chats have in common."""
        self._written[index] += len(completion.token_ids)
        if completion.logprobs is not None:
            decode_logprobs(completion.logprobs, self.tokenizer)
        fields: Answer = {
            "logprobs": None if completion.logprobs is None else self.logprobs(index, completion),
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
        }
        if self.request.return_token_ids:
            fields["token_ids"] = completion.token_ids
        if completion.rounds is not None:
            if index not in self._rounds:
                request = self.ticket.begun[prompt].requests[0]
                self._rounds[index] = RoundTexts(self.tokenizer, request)
            fields["rounds"] = self._rounds[index].rounds(completion)
        return fields

    def logprobs(self, index: int, completion: CompletionOutput) -> Answer:
        """The log-probabilities (natural logarithm) of the tokens of the choice with this index, in
        the shape of completions. Offsets are those of the tokens' own texts in characters."""
        pairs = list(zip(completion.token_ids, completion.logprobs or (), strict=True))
        texts = [entries[token].decoded_token or "" for token, entries in pairs]
        *offsets, end = itertools.accumulate(map(len, texts), initial=self._offsets.get(index, 0))
        self._offsets[index] = end
        return {
            "tokens": [self.token_name(token, entries[token]) for token, entries in pairs],
            "text_offset": offsets,
            "token_logprobs": [_finite(entries[token]) for token, entries in pairs],
            "top_logprobs": [self._by_name(token, entries) for token, entries in pairs],
        }

    def _by_name(self, token: int, entries: Mapping[int, Logprob]) -> dict[str, float]:
        """The log-probabilities beside a token by name. Of tokens with the same text, as parts of
        characters have, it holds the token itself or the first."""
        by_name = {self.token_name(token, entries[token]): _finite(entries[token])}
        for other, entry in entries.items():
            by_name.setdefault(self.token_name(other, entry), _finite(entry))
        return by_name

    def token_name(self, token: int, entry: Logprob) -> str:
        """The text of a token, which others may have too, or its id."""
        if self.request.return_tokens_as_token_ids:
            return f"token_id:{token}"
        return entry.decoded_token or ""

    def _usage(self) -> Answer:
        prompt_tokens = sum(len(prompt.token_ids) for prompt in self.ticket.prompts)
        return _token_counts(prompt_tokens, self._written.total())

    def _usage_so_far(self, output: RequestOutput, index: int) -> Answer | None:
        """Of the choice with this index, as in vLLM; None if chunks are not to say."""
        if not self.request.usage_in_chunks:
            return None
        return _token_counts(len(output.prompt_token_ids), self._written[index])

    def _metrics(self) -> Answer | None:
        """Acceptance of a single response; of several there is none (as in vLLM)."""
        drafts = self.ticket.most_drafts
        if self._detail == "none" or drafts is None or self.ticket.responses > 1:
            return None
        request = self.ticket.begun[0].requests[0]
        most = min(drafts, request.most_drafts)
        return {"speculative_decoding": acceptance(request, most, self._detail == "detailed")}


class ChatWriter(CompletionWriter):
    """Writes the answer to one request of /v1/chat/completions."""

    request: ChatRequest
    id_prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def whole(self, outputs: Sequence[RequestOutput]) -> Answer:
        """As of completions, with the ids of the prompt beside the choices."""
        return super().whole(outputs) | self._prompt(outputs[0])

    def _prompt(self, output: RequestOutput) -> Answer:
        ids = {"prompt_token_ids": output.prompt_token_ids}
        return ids if self.request.return_token_ids else {}

    def chunks(self, prompt: int, output: RequestOutput) -> Iterator[Answer]:
        """Chunks for a delta: before the first of a choice one that names the role."""
        for completion in output.outputs:
            index = completion.index
            if index not in self._begun:
                self._begun.add(index)
                delta = {"role": "assistant", "content": ""}
                opening = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
                yield self.chunk([opening], self._usage_so_far(output, index)) | self._prompt(
                    output
                )
            choice = {"index": index, "delta": {"content": completion.text}}
            choice |= self.common_fields(prompt, index, completion)
            yield self.chunk([choice], self._usage_so_far(output, index))

    def choice(self, prompt: int, output: RequestOutput, completion: CompletionOutput) -> Answer:
        """A choice with the message that was written."""
        message = {"role": "assistant", "content": completion.text, "refusal": None}
        choice = {"index": completion.index, "message": message}
        return choice | self.common_fields(prompt, completion.index, completion)

    def logprobs(self, index: int, completion: CompletionOutput) -> Answer:
        """The log-probabilities of the tokens in the shape of chats, the likeliest first."""
        content = []
        most = None if self.request.top_logprobs == -1 else self.request.top_logprobs
        for token, entries in zip(completion.token_ids, completion.logprobs or (), strict=True):
            best = sorted(entries.items(), key=lambda pair: -pair[1].logprob)
            top = [self._token(*pair) for pair in best[:most]]
            content.append(self._token(token, entries[token]) | {"top_logprobs": top})
        return {"content": content}

    def _token(self, token: int, entry: Logprob) -> Answer:
        text = _bytes_of(self.tokenizer, token, entry.decoded_token or "")
        return {
            "token": self.token_name(token, entry),
            "logprob": _finite(entry),
            "bytes": None if text is None else list(text),
        }


def _bytes_of(tokenizer: Any, token: int, text: str) -> bytes | None:
    """The bytes that a token with this text adds to a response: several of them may be one
    character. None where they are not known."""
    known = _text_bytes(tokenizer).get(token)
    if known is not None:
        return known
    return None if REPLACEMENT in text else text.encode()


@lru_cache(maxsize=4)
def _text_bytes(tokenizer: Any) -> Mapping[int, bytes]:
    """The bytes of every token with text; none where they depend on their neighbours."""
    try:
        return token_bytes(tokenizer, "tokenizer", math.inf).text
    except ConfigError:
        return {}


class EventStream(StreamingResponse):
    """Calls `on_close` when the stream ends, also if the client leaves before the first event."""

    def __init__(self, events: AsyncIterator[str], on_close: Callable[[], None]) -> None:
        headers = {"Cache-Control": "no-cache"}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._on_close = on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the events, as an ASGI application. A stream that --shutdown-timeout ends has an
        error as its last event."""
        try:
            await super().__call__(scope, receive, send)
        except asyncio.CancelledError:  # uvicorn's: a client that leaves cancels a scope inside
            last = f"data: {error_json(APIError(503, SHUTTING_DOWN))}\n\n{DONE}"
            await send({"type": "http.response.body", "body": last.encode(), "more_body": False})
        finally:
            self._on_close()


class RoundTexts:
    """Rounds of one response with their texts: committed tokens (accepted drafts with their
    position in the proposal from 0, then the target's own with none), and rejected drafts.

    The texts of committed tokens concatenate to the response's: a token that ends within a
    character has none, and the one that completes the character has all of it. (Stop strings and
    stop tokens are among them, and not in the response.)"""

    def __init__(self, tokenizer: Any, request: Request) -> None:
        self._tokenizer = tokenizer
        params = SamplingParams(skip_special_tokens=request.params.skip_special_tokens)
        prompt = request.token_ids[: request.num_prompt_tokens]
        self._detokenizer = Detokenizer(tokenizer, prompt, params)

    def rounds(self, completion: CompletionOutput) -> list[Answer]:
        """The rounds of a delta, which must come in their order."""
        rounds: list[Answer] = []
        for judged in completion.rounds or ():
            committed = []
            for token, position in judged.tokens:
                self._detokenizer.push([token])
                text = self._detokenizer.take()
                committed.append({"token_id": token, "text": text, "position": position})
            rejected = [
                {"token_id": token, "text": self._tokenizer.decode([token]), "position": position}
                for token, position in judged.rejected
            ]
            drafted = judged.num_draft_tokens
            rounds.append({"tokens": committed, "rejected": rejected, "num_draft_tokens": drafted})
        if completion.finish_reason is not None and rounds:
            self._detokenizer.finish()
            rounds[-1]["tokens"][-1]["text"] += self._detokenizer.take()
        return rounds


def acceptance(request: Request, most: int, detailed: bool) -> Answer:
    """The acceptance of a response under vLLM's names. acceptance_histogram[j]: verifications that
    accepted j of at most `most` drafts; `detailed` adds an entry per verification."""
    counters = request.counters
    accepted_tokens = counters.num_accepted_tokens
    draft_tokens = counters.num_draft_tokens
    rounds = zip(request.drafted_per_round, request.accepted_per_round, strict=True)
    steps = [(drafted, accepted) for drafted, accepted in rounds if drafted]
    accepted = [count for _, count in steps]
    return {
        "mean_acceptance_length": acceptance_length(accepted_tokens, counters.num_drafts),
        "draft_acceptance_rate": accepted_tokens / max(draft_tokens, 1),
        "acceptance_histogram": [accepted.count(j) for j in range(max(most, *accepted, 0) + 1)],
        "num_spec_steps": counters.num_drafts,
        "num_accepted_draft_tokens": accepted_tokens,
        "num_draft_tokens": draft_tokens,
        "num_spec_tokens": most,
        "per_step_accepted": accepted if detailed else None,
        "per_step_drafted": [drafted for drafted, _ in steps] if detailed else None,
    }


def _token_counts(prompt_tokens: int, completion_tokens: int) -> Answer:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def _finite(entry: Logprob) -> float:
    return max(entry.logprob, LEAST_LOGPROB)
