"""The exchanges in the bytes of a request and of its answer: whole, or a stream of server-sent
events that may end anywhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import from_json

from draftsmith.inference.metrics import SpecDecodeCounters
from draftsmith.inference.traffic_log.asked import asked_sampling, asked_template
from draftsmith.inference.traffic_log.records import LoggedExchange

# fields of a message in which servers put what they took out of its text
TAKEN_OUT = ("tool_calls", "function_call", "reasoning", "reasoning_content")

Json = dict[str, Any]


@dataclass
class Choice:
    """A response as its pieces come."""

    text: str = ""
    whole_text: bool = True  # as the target wrote it
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    finish_reason: str | None = None

    def add(self, piece: Json) -> None:
        """A choice of an answer, or of an event of a stream."""
        message = piece.get("message") or piece.get("delta") or {}
        self.text += piece.get("text") or message.get("content") or ""
        if any(message.get(name) for name in TAKEN_OUT):
            self.whole_text = False
        if piece.get("token_ids") is not None:
            self.token_ids = [*(self.token_ids or ()), *piece["token_ids"]]
        self.prompt_token_ids = piece.get("prompt_token_ids") or self.prompt_token_ids
        self.finish_reason = piece.get("finish_reason") or self.finish_reason


@dataclass
class Answer:
    """What an answer says, by the index of its choices."""

    model: str = ""
    choices: dict[int, Choice] = field(default_factory=dict)
    prompt_token_ids: list[int] | None = None  # of chats
    spec_decode: SpecDecodeCounters | None = None

    def add(self, part: Json) -> None:
        """The whole of it, or the next event."""
        self.model = part.get("model") or self.model
        self.prompt_token_ids = part.get("prompt_token_ids") or self.prompt_token_ids
        for piece in part.get("choices") or ():
            self.choices.setdefault(piece["index"], Choice()).add(piece)
        drafting = (part.get("metrics") or {}).get("speculative_decoding")
        if drafting is not None:
            self.spec_decode = counters_of(drafting)


def read_exchanges(
    time: float, request: bytes, answer: bytes, events: bool
) -> list[LoggedExchange]:
    """One for each response. `time`: of the request's arrival, in seconds since 1970. `events`: the
    answer is a stream of them. None of what is not JSON in the shape of OpenAI's API, and of
    answers that repeat the prompt."""
    try:
        body = from_json(request)
        if body.get("echo"):
            return []
        whole = Answer()
        for part in _events(answer) if events else [from_json(answer)]:
            whole.add(part)
        return [_exchange(time, body, whole, index) for index in sorted(whole.choices)]
    except (ValueError, TypeError, KeyError, IndexError, AttributeError):  # of another shape
        return []


def counters_of(drafting: Mapping[str, Any]) -> SpecDecodeCounters:
    """The counters in vLLM's `speculative_decoding` of an answer. acceptance_histogram[j] counts
    the rounds that accepted j drafts, so those that accepted draft k are the rounds beyond k."""
    histogram = drafting["acceptance_histogram"]
    return SpecDecodeCounters(
        num_drafts=drafting["num_spec_steps"],
        num_draft_tokens=drafting["num_draft_tokens"],
        num_accepted_tokens=drafting["num_accepted_draft_tokens"],
        num_accepted_tokens_per_pos=[sum(histogram[k:]) for k in range(1, len(histogram))],
    )


def _events(answer: bytes) -> Iterator[Json]:
    """Those that are whole: a client may leave within one."""
    for line in answer.split(b"\n")[:-1]:
        data = line.removeprefix(b"data:").strip()
        if line.startswith(b"data:") and data != b"[DONE]":
            yield from_json(data)


def _exchange(time: float, body: Json, answer: Answer, index: int) -> LoggedExchange:
    choice = answer.choices[index]
    prompt_token_ids = choice.prompt_token_ids or answer.prompt_token_ids
    messages = body.get("messages")
    prompt = None
    if messages is None:
        prompt = _prompts(body["prompt"])[index // (body.get("n") or 1)]
    if isinstance(prompt, list):
        prompt_token_ids = prompt
        prompt = None
    return LoggedExchange(
        time=time,
        model=answer.model,
        messages=messages,
        chat_template_kwargs={} if messages is None else asked_template(body),
        prompt=prompt,
        prompt_token_ids=prompt_token_ids,
        text=choice.text if choice.whole_text else None,
        token_ids=choice.token_ids,
        finish_reason=choice.finish_reason,
        sampling=asked_sampling(body),
        spec_decode=answer.spec_decode,
    )


def _prompts(value: Any) -> Sequence[Any]:
    """A text, token ids, or a list of either -> a list of prompts."""
    if isinstance(value, str) or (value and isinstance(value[0], int)):
        return [value]
    return value
