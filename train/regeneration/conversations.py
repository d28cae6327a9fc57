"""Conversations whose responses are written anew, turn by turn.

`regenerate.turns: last` asks for the last response of each; `all` for every one, where each prompt
holds the responses written before it, as a chat with the target would."""

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
    """One response to be written. `example`: the conversation up to the response."""

    key: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    example: Example
    number: int  # of the conversation
    turn: int  # among the written turns of the conversation, from 0


@dataclass
class Account:
    """The fate of every wanted response. wanted = written + reused + failed + left out when a run
    has ended.

    wanted     turns to be written, over all conversations
    reused     stored before, or asked for already under the same key
    written    by this run; `tokens` of them
    failed     by reason: asked for without success
    left_out   by reason: never asked for
    retries    by reason
    unproved   with exchange: text, responses whose tokens may be others than those written
    earlier    conversations whose response is to an earlier turn, as the last prompt leaves no room
    cut        responses without an end: max_new_tokens or data.max_length came first
    """

    wanted: int = 0
    reused: int = 0
    written: int = 0
    tokens: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    left_out: Counter[str] = field(default_factory=Counter)
    retries: Counter[str] = field(default_factory=Counter)
    unproved: int = 0
    earlier: int = 0
    cut: int = 0

    @property
    def done(self) -> int:
        return self.reused + self.written + self.failed.total()

    @property
    def total(self) -> int:
        """Responses that will be done, as far as is known."""
        return self.wanted - self.left_out.total()

    def to_dict(self) -> dict[str, Any]:
        numbers = {
            name: getattr(self, name)
            for name in ("wanted", "reused", "written", "tokens", "unproved", "earlier", "cut")
        }
        by_reason = {
            name: dict(sorted(getattr(self, name).items()))
            for name in ("failed", "left_out", "retries")
        }
        return numbers | by_reason

    def __str__(self) -> str:
        parts = [f"{self.wanted} responses wanted: {self.written} written, {self.reused} reused"]
        for word, counts in (("failed", self.failed), ("left out", self.left_out)):
            if counts:
                reasons = ", ".join(
                    f"{reason}: {number}" for reason, number in counts.most_common()
                )
                parts.append(f"{counts.total()} {word} ({reasons})")
        if self.earlier:
            parts.append(f"{self.earlier} to an earlier turn (the last prompt leaves no room)")
        return ", ".join(parts)

    def lines(self, max_new_tokens: int) -> list[str]:
        """What the console says of a run: the account, and warnings with what to do."""
        lines, left_out = [str(self)], self.left_out.total()
        if left_out > LEFT_OUT_SHARE * self.wanted:
            lines.append(
                f"warning: {left_out} of {self.wanted} responses ({left_out / self.wanted:.0%}) are"
                " left out; a larger data.max_length takes longer prompts"
            )
        there = self.reused + self.written
        if self.cut:
            lines.append(
                f"{self.cut} of {there} responses ({self.cut / there:.0%}) were cut before their"
                f" end, at regenerate.max_new_tokens ({max_new_tokens}) or data.max_length"
            )
        if self.cut > CUT_SHARE * there:
            lines[-1] = (
                f"warning: {lines[-1]}; raise max_new_tokens. For a model that thinks first,"
                " data.chat_template_kwargs: {enable_thinking: false} asks for answers without"
                " thoughts"
            )
        return lines


@dataclass(frozen=True)
class ConversationRules:
    """Shared settings of a run's conversations.

    room   longest prompt that leaves a response, in tokens
    end    tokens that end a response
    """

    section: RegenerateSection
    tokenizer: ConversationTokenizer
    account: Account
    room: int
    end: frozenset[int]


LEFT_OUT_SHARE = 0.05  # of the wanted responses, above which what is left out is warned of
CUT_SHARE = 1 / 3  # of the responses, above which those that were cut are warned of
LEAST_RESPONSE = 64  # tokens of room for a response, or max_new_tokens if those are fewer
TOO_LONG = "the prompt leaves no room in data.max_length"
AFTER_CUT = "the turn before it was cut at max_new_tokens"
AFTER_FAILED = "a turn before it failed"


class Conversation:
    """One example. `ask()` until it is None; every time `add_response` or `fail` follows."""

    def __init__(
        self, number: int, example: Example, temperature: float, rules: ConversationRules
    ) -> None:
        self.number, self.example, self.temperature, self._rules = (
            number,
            example,
            temperature,
            rules,
        )
        self.responses: list[Response] = []
        self._messages = list(example.messages)
        self._turns, self._next = _written_turns(example, rules.section.turns), 0
        self._pending: Ask | None = None
        self.first: Ask | None = None
        rules.account.wanted += len(self._turns)

    def ask(self) -> Ask | None:
        """The next response to be written; the same one until it is added or has failed."""
        if self._pending is None and self._next < len(self._turns):
            section = self._rules.section
            so_far, prompt = self._prompt(self._turns[self._next])
            if section.turns == "last":
                so_far, prompt = self._fitting(so_far, prompt)
            if len(prompt) > self._rules.room:
                self._leave_out(TOO_LONG)
                return None
            turn = f"/{self._next}" if self._next else ""
            params = SamplingParams(
                temperature=self.temperature,
                top_p=section.top_p,
                top_k=section.top_k,
                max_tokens=min(section.max_new_tokens, self._rules.room + 2 - len(prompt)),
                seed=_seed(f"{section.seed}/{self.number}{turn}"),
            )
            limit = [params.max_tokens] if params.max_tokens != section.max_new_tokens else []
            # Equal prompts get different samples, and the same greedy response.
            identity = [
                list(prompt),
                self.temperature,
                self.number if self.temperature else 0,
                *limit,
            ]
            self._pending = Ask(
                digest(identity, 24), prompt, params, so_far, self.number, self._next
            )
            self.first = self.first or self._pending
        return self._pending

    def _prompt(self, turn: int) -> tuple[Example, tuple[int, ...]]:
        """The conversation before message `turn`, and its tokens."""
        so_far = self.example
        if so_far.prompt is None:
            so_far = replace(so_far, messages=tuple(self._messages[:turn]))
        return so_far, tuple(self._rules.tokenizer.prompt_ids(so_far))

    def _fitting(self, so_far: Example, prompt: tuple[int, ...]) -> tuple[Example, tuple[int, ...]]:
        """The last turn whose prompt leaves room for a response; the given one if none does."""
        rules = self._rules
        longest = rules.room + 2 - min(rules.section.max_new_tokens, LEAST_RESPONSE)
        if len(prompt) <= longest or self.example.prompt is not None:
            return so_far, prompt
        for turn in reversed(_written_turns(self.example, "all")[:-1]):
            earlier = self._prompt(turn)
            if len(earlier[1]) <= longest:
                rules.account.earlier += 1
                return earlier
        return so_far, prompt

    def add_response(self, token_ids: Sequence[int]) -> None:
        asked = self._take_pending()
        if token_ids:
            self.responses.append(
                Response(
                    self.example.workload,
                    asked.prompt_ids,
                    tuple(token_ids),
                    self.temperature,
                    self.number,
                )
            )
        if token_ids and token_ids[-1] not in self._rules.end:
            self._rules.account.cut += 1
        if self._next == len(self._turns):
            return
        if not token_ids or token_ids[-1] not in self._rules.end:
            self._leave_out(AFTER_CUT)
            return
        text = self._rules.tokenizer.tokenizer.decode(
            list(token_ids[:-1]), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        self._messages[self._turns[asked.turn]] = {"role": "assistant", "content": text}

    def fail(self) -> None:
        """The response failed for good. Later turns of the conversation are left out."""
        self._take_pending()
        self._leave_out(AFTER_FAILED)

    def _take_pending(self) -> Ask:
        asked = self._pending
        assert asked is not None, "no response was asked for"
        self._pending, self._next = None, self._next + 1
        return asked

    def _leave_out(self, reason: str) -> None:
        if rest := len(self._turns) - self._next:
            self._rules.account.left_out[reason] += rest
        self._next = len(self._turns)


def _seed(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big")


def _written_turns(example: Example, which: str) -> list[int]:
    """Indices of the messages that are written anew; the number of messages where the user spoke
    last.

    Calls of tools stay where another message follows: the tool's answer in the data belongs to that
    call."""
    if example.prompt is not None:
        return [0]
    last = len(example.messages) - (example.messages[-1]["role"] == "assistant")
    if which == "last":
        return [last]
    said = [
        message["role"] == "assistant" and not message.get("tool_calls")
        for message in example.messages[:last]
    ]
    return [i for i in range(1, last) if said[i]] + [last]
