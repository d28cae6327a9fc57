"""Conversations whose responses are written anew, turn by turn.

`regenerate.turns: last` asks for the last response of each; `all` for every one, where each prompt
holds the responses written before it, as a chat with the target would."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from draftsmith.inference import SamplingParams
from draftsmith.train.data.examples import Example
from draftsmith.train.data.loss_mask import ConversationTokenizer
from draftsmith.train.recipe.data_sections import RegenerateSection
from draftsmith.train.regeneration.store import Response, digest

SEED = 0  # of the sampling, with the conversation and the turn
CUT_SHARE = 1 / 3  # of the responses, above which those that were cut are warned of
LEAST_RESPONSE = 64  # tokens of room for a response, or max_new_tokens if those are fewer
TOO_LONG = "the prompt leaves no room in data.max_length or the target's context"
AFTER_CUT = "the turn before it was cut"


@dataclass(frozen=True)
class TargetFacts:
    """What is known of the target, loaded or not."""

    name: str
    max_model_len: int  # longest prompt and response together
    vocab_size: int
    end: tuple[int, ...]  # tokens that end a response


@dataclass(frozen=True)
class Ask:
    """One response to be written. `example`: the conversation up to the response."""

    key: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    example: Example


@dataclass
class Account:
    """The fate of every response: at the end of a run, requested = written + reused + left out.

    requested  turns to be written, over all conversations
    reused     stored before, or asked for already under the same key
    written    by this run; `tokens` of them
    left_out   by reason: not asked for, or refused by a server
    earlier    conversations whose response is to an earlier turn, as the last prompt leaves no room
    cut        responses without an end: max_new_tokens or data.max_length came first
    """

    requested: int = 0
    reused: int = 0
    written: int = 0
    tokens: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    earlier: int = 0
    cut: int = 0

    @property
    def done(self) -> int:
        """Responses that are there: read from the store, or written now."""
        return self.reused + self.written

    @property
    def total(self) -> int:
        """Responses that will be done, as far as is known."""
        return self.requested - self.left_out.total()

    def __str__(self) -> str:
        parts = [f"{self.requested} responses: {self.written} written, {self.reused} reused"]
        if self.left_out:
            reasons = (f"{reason}: {number}" for reason, number in self.left_out.most_common())
            parts.append(f"{self.left_out.total()} left out ({', '.join(reasons)})")
        if self.earlier:
            parts.append(f"{self.earlier} to an earlier turn (the last prompt leaves no room)")
        return ", ".join(parts)

    def lines(self, *, thinks: bool) -> list[str]:
        """What the console says of a run: the account, and a warning with what to do. `thinks`: the
        responses begin with thoughts that the chat template can turn off."""
        lines = [str(self)]
        if self.cut > CUT_SHARE * self.done:
            warning = (
                f"warning: {self.cut} of {self.done} responses were cut before their end, at"
                " regenerate.max_new_tokens or data.max_length; raise it"
            )
            if thinks:
                warning += (
                    ", or have the model answer at once:"
                    " data.chat_template_kwargs: {enable_thinking: false}"
                )
            lines.append(warning)
        return lines


@dataclass(frozen=True)
class ConversationRules:
    """Shared settings of a run's conversations."""

    section: RegenerateSection
    tokenizer: ConversationTokenizer
    account: Account
    facts: TargetFacts

    @property
    def room(self) -> int:
        """The longest prompt that leaves a response, in tokens."""
        return self.facts.max_model_len - 2


class Conversation:
    """One example. `ask()` until it is None; every time `add_response` or `leave_out` follows."""

    def __init__(
        self,
        number: int,
        example: Example,
        temperature: float,
        rules: ConversationRules,
        prompts: Sequence[tuple[int, ...]] | None = None,
    ) -> None:
        """`prompts`: of the last responses of all conversations; None: they are made here."""
        self.number = number
        self.example = example
        self.temperature = temperature
        self.responses: list[Response] = []
        self._prompts = prompts
        self._rules = rules
        self._messages = list(example.messages)
        self._turns = _written_turns(example, rules.section.turns)
        self._next = 0
        self._pending: Ask | None = None
        rules.account.requested += len(self._turns)

    @property
    def length(self) -> int:
        """Characters of the example, which tell its cost without tokenising it."""
        texts = [message["content"] for message in self._messages]
        return sum(map(len, [*texts, self.example.prompt or ""]))

    def ask(self) -> Ask | None:
        """The next response to be written; the same one until it is added or left out."""
        if self._pending is None and self._next < len(self._turns):
            so_far, prompt = self._prompt(self._turns[self._next])
            if self._rules.section.turns == "last":
                so_far, prompt = self._fitting(so_far, prompt)
            if len(prompt) > self._rules.room:
                self.leave_out(TOO_LONG)
                return None
            self._pending = self._make_ask(so_far, prompt)
        return self._pending

    def _make_ask(self, so_far: Example, prompt: tuple[int, ...]) -> Ask:
        section = self._rules.section
        text = f"{SEED}/{self.number}" + (f"/{self._next}" if self._next else "")
        params = SamplingParams(
            temperature=self.temperature,
            top_p=section.top_p,
            top_k=section.top_k,
            max_tokens=min(section.max_new_tokens, self._rules.room + 2 - len(prompt)),
            seed=int(hashlib.sha256(text.encode()).hexdigest()[:12], 16),
        )
        # Equal prompts get different samples, and the same greedy response.
        identity = [list(prompt), self.temperature, self.number if self.temperature else 0]
        if params.max_tokens != section.max_new_tokens:
            identity.append(params.max_tokens)
        return Ask(digest(identity, 24), prompt, params, so_far)

    def _prompt(self, turn: int) -> tuple[Example, tuple[int, ...]]:
        """The conversation before message `turn`, and its tokens."""
        so_far = self.example
        if so_far.prompt is None:
            so_far = replace(so_far, messages=tuple(self._messages[:turn]))
        # as the data has it: the last turn, and no other has been written anew
        if self._prompts is not None and turn == self._turns[-1] and not self.responses:
            return so_far, self._prompts[self.number]
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
        """The response that was asked for. One that was cut ends the conversation."""
        assert self._pending is not None, "no response was asked for"
        prompt_ids = self._pending.prompt_ids
        place = self._turns[self._next]
        self._pending = None
        self._next += 1
        ended = bool(token_ids) and token_ids[-1] in self._rules.facts.end
        if token_ids:
            response = Response.of(
                self.example.workload,
                prompt_ids,
                token_ids,
                temperature=self.temperature,
                example=self.number,
            )
            self.responses.append(response)
            self._rules.account.cut += not ended
        if self._next == len(self._turns):
            return
        if not ended:
            self.leave_out(AFTER_CUT)
            return
        text = self._rules.tokenizer.tokenizer.decode(
            list(token_ids[:-1]), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        self._messages[place] = {"role": "assistant", "content": text}

    def leave_out(self, reason: str) -> None:
        """Ends the conversation: what is not written yet is left out."""
        self._rules.account.left_out[reason] += len(self._turns) - self._next
        self._pending = None
        self._next = len(self._turns)


def _written_turns(example: Example, which: str) -> list[int]:
    """Indices of the messages that are written anew; a user who spoke last has one to come.

    Calls of tools stay where another message follows: the tool's answer belongs to them."""
    if example.prompt is not None:
        return [0]
    last = len(example.messages) - (example.messages[-1]["role"] == "assistant")
    if which == "last":
        return [last]
    answers = [
        index
        for index, message in enumerate(example.messages[:last])
        if index and message["role"] == "assistant" and not message.get("tool_calls")
    ]
    return [*answers, last]
