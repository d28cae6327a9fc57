"""Conversations whose responses are written anew, one turn after another: what is asked next, and what became of it.

`regenerate.turns: last` asks for the last response of each; `all` for every one, each prompt holding those written
before it, as a chat with the target would have gone. Knows the chat template through the tokenizer; not who writes.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from inference import SamplingParams
from train.data.loss_mask import ConversationTokenizer
from train.data.sources import Example
from train.recipe.data_sections import RegenerateSection
from train.regeneration.store import Response, digest


@dataclass(frozen=True)
class Ask:
    """One response to be written. `example` is that of the conversation so far, which ends where it is to come."""

    key: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    example: Example
    number: int  # of the conversation
    turn: int  # of its written turns, from 0


@dataclass
class Account:
    """What became of every response that was wanted; `settled` holds when a run has ended.

    wanted     turns to be written, over all conversations
    reused     found among those kept, or asked for already under the same key
    written    by this run
    failed     by reason: asked for, and not to be had
    left_out   by reason: never asked for
    """

    wanted: int = 0
    reused: int = 0
    written: int = 0
    tokens: int = 0  # of `written`
    failed: Counter[str] = field(default_factory=Counter)
    left_out: Counter[str] = field(default_factory=Counter)
    retries: Counter[str] = field(default_factory=Counter)  # by reason
    unproved: int = 0  # with exchange: text, responses whose tokens may be others than those written

    @property
    def done(self) -> int:
        return self.reused + self.written + self.failed.total()

    @property
    def total(self) -> int:
        """That will be done, as far as is known."""
        return self.wanted - self.left_out.total()

    @property
    def settled(self) -> bool:
        return self.done == self.total

    def to_dict(self) -> dict[str, Any]:
        plain = {name: getattr(self, name) for name in ("wanted", "reused", "written", "tokens", "unproved")}
        counted = {name: dict(sorted(getattr(self, name).items())) for name in ("failed", "left_out", "retries")}
        return plain | counted

    def __str__(self) -> str:
        parts = [f"{self.wanted} responses wanted: {self.written} written, {self.reused} reused"]
        for word, counts in (("failed", self.failed), ("left out", self.left_out)):
            if counts:
                told = ", ".join(f"{reason}: {number}" for reason, number in counts.most_common())
                parts.append(f"{counts.total()} {word} ({told})")
        return ", ".join(parts)


TOO_LONG = "the prompt leaves no room in data.max_length"
AFTER_CUT = "the turn before it was cut at max_new_tokens"
AFTER_FAILED = "a turn before it failed"


class Conversation:
    """One example; `ask()` until it is None, each time followed by `tell` or `fail`.

    room: longest prompt that leaves a response, in tokens; end: tokens that end a response.
    """

    def __init__(
        self,
        number: int,
        example: Example,
        temperature: float,
        tokenizer: ConversationTokenizer,
        section: RegenerateSection,
        *,
        room: int,
        end: frozenset[int],
        account: Account,
    ) -> None:
        self.number, self.example, self.temperature = number, example, temperature
        self.responses: list[Response] = []
        self._tokenizer, self._section, self._room, self._end = tokenizer, section, room, end
        self._account, self._messages = account, list(example.messages)
        self._turns, self._next = _written_turns(example, section.turns), 0
        self._pending: Ask | None = None
        self.first: Ask | None = None  # of what was asked
        account.wanted += len(self._turns)

    def ask(self) -> Ask | None:
        """The response that is wanted next; the same one until it is told."""
        if self._pending is None and self._next < len(self._turns):
            so_far = self.example
            if so_far.prompt is None:
                so_far = replace(so_far, messages=tuple(self._messages[: self._turns[self._next]]))
            prompt = tuple(self._tokenizer.prompt_ids(so_far))
            if len(prompt) > self._room:
                self._leave(TOO_LONG)
                return None
            params = self._params(len(prompt))
            limit = [params.max_tokens] if params.max_tokens != self._section.max_new_tokens else []
            # Equal prompts get different samples, and the same greedy response.
            place = [list(prompt), self.temperature, self.number if self.temperature else 0, *limit]
            self._pending = Ask(digest(place, 24), prompt, params, so_far, self.number, self._next)
            self.first = self.first or self._pending
        return self._pending

    def tell(self, token_ids: Sequence[int]) -> None:
        """What was written."""
        asked = self._taken()
        if token_ids:
            self.responses.append(
                Response(self.example.workload, asked.prompt_ids, tuple(token_ids), self.temperature, self.number)
            )
        if self._next == len(self._turns):
            return
        if not token_ids or token_ids[-1] not in self._end:
            self._leave(AFTER_CUT)
            return
        text = self._tokenizer.tokenizer.decode(
            list(token_ids[:-1]), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        self._messages[self._turns[asked.turn]] = {"role": "assistant", "content": text}

    def fail(self) -> None:
        """It is not to be had; what would have come after it is not asked for."""
        self._taken()
        self._leave(AFTER_FAILED)

    def _taken(self) -> Ask:
        asked = self._pending
        assert asked is not None, "told before it was asked"
        self._pending, self._next = None, self._next + 1
        return asked

    def _leave(self, reason: str) -> None:
        if rest := len(self._turns) - self._next:
            self._account.left_out[reason] += rest
        self._next = len(self._turns)

    def _params(self, prompt: int) -> SamplingParams:
        section, turn = self._section, f"/{self._next}" if self._next else ""
        return SamplingParams(
            temperature=self.temperature,
            top_p=section.top_p,
            top_k=section.top_k,
            max_tokens=min(section.max_new_tokens, self._room + 2 - prompt),
            seed=_seed(f"{section.seed}/{self.number}{turn}"),
        )


def _seed(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big")


def _written_turns(example: Example, which: str) -> list[int]:
    """Places of the messages that are written anew; behind them all, where the user spoke last.

    What calls a tool stays as it is where something follows: the tool's answer in the data is to that call.
    """
    if example.prompt is not None:
        return [0]
    last = len(example.messages) - (example.messages[-1]["role"] == "assistant")
    if which == "last":
        return [last]
    earlier = [
        i
        for i, message in enumerate(example.messages[:last])
        if i > 0 and message["role"] == "assistant" and not message.get("tool_calls")
    ]
    return [*earlier, last]
