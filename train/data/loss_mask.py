"""The loss mask of a conversation: what the assistant wrote, by the chat template.

A mask is either proved or refused (`BadRow`). It is proved for each assistant turn on the
conversation that ends with that turn, as serving would see it, in one of two ways:

1. the template marks the assistant's text itself (`{% generation %}`), and the tokenizer reports
   those tokens;
2. otherwise the tokens of the prompt (everything before the turn, plus the generation prompt) must
   be a true prefix of the tokens including the turn; the difference is the response.

The response's tokens are supervised *and the end-of-turn token* (the special token that closes it),
since the target must emit that too; template text after it (a newline) is not. A template without
such a token supervises the whole turn. Template languages whose turns end with the next turn's
header teach no end.

Templates that rewrite history (dropping `<think>` of earlier turns, moving the system prompt to the
last user turn) render an earlier turn differently from the text that the target saw when it wrote
it. Such a conversation becomes several rows: as few as give every assistant turn once, each in the
context it was written in."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property, partial
from typing import Any, Literal

import numpy as np
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from draftsmith.inference.provenance import text_sha256
from draftsmith.speculators.errors import DataError
from draftsmith.train.data.bad_rows import BadRow
from draftsmith.train.data.examples import (
    REASONING_FIELDS,
    Example,
    Message,
    is_learned,
    says_something,
    thought_of,
)
from draftsmith.train.data.pieces import PiecewiseTokenizer, SpecialTokens, tokenise
from draftsmith.train.data.template_date import KEY, dated

_MARKER = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


@dataclass(eq=False)
class TokenRow:
    """One document. `input_ids` int32 [T]; `loss_mask` bool [T]: the token is to be predicted."""

    input_ids: np.ndarray
    loss_mask: np.ndarray
    workload: str = "default"
    truncated: bool = False

    def __post_init__(self) -> None:
        self.input_ids = np.asarray(self.input_ids, dtype=np.int32)
        self.loss_mask = np.asarray(self.loss_mask, dtype=bool)
        if self.input_ids.shape != self.loss_mask.shape or self.input_ids.ndim != 1:
            raise DataError(
                f"a row needs one mask value per token, got {self.input_ids.shape},"
                f" {self.loss_mask.shape}"
            )

    def __len__(self) -> int:
        return len(self.input_ids)

    @classmethod
    def from_response(
        cls, prompt_ids: Sequence[int], response_ids: Sequence[int], workload: str
    ) -> TokenRow:
        """A prompt and the response the target wrote to it, as tokens: nothing is left to prove."""
        return cls(
            np.concatenate([np.asarray(prompt_ids, np.int32), np.asarray(response_ids, np.int32)]),
            np.repeat([False, True], [len(prompt_ids), len(response_ids)]),
            workload,
        )


@dataclass(frozen=True, eq=False)
class Turn:
    """One assistant turn: the tokens up to its end, and the mask of those that it wrote."""

    ids: list[int]
    mask: np.ndarray  # bool [len(ids)]


def fewest_rows(turns: Sequence[Turn], workload: str) -> list[TokenRow]:
    """Turns of one conversation as rows: a turn that another begins with is supervised in its
    row."""
    pending = list(turns)
    rows = []
    while pending:
        last = pending[-1]
        covered = [turn for turn in pending if last.ids[: len(turn.ids)] == turn.ids]
        mask = np.zeros(len(last.ids), dtype=bool)
        for turn in covered:
            mask[: len(turn.ids)] |= turn.mask
        rows.append(TokenRow(np.asarray(last.ids), mask, workload))
        pending = [turn for turn in pending if turn not in covered]
    return rows[::-1]


class ConversationTokenizer:
    """Turns examples into token rows with proved masks."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        chat_template: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        reasoning: Literal["keep", "drop"] = "keep",
        date: datetime | None = None,
    ) -> None:
        """`chat_template`: text, instead of the tokenizer's; `template_kwargs`: its variables;
        `date`: what a template that asks for the time is told, instead of the clock's."""
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self.template_kwargs = dict(template_kwargs or {})
        self.reasoning = reasoning
        self.date = date

    def template_facts(self) -> dict[str, Any]:
        """The hash of the template and its variables, which serving has to use too, and the date
        that it printed."""
        template = self.chat_template or self.tokenizer.chat_template
        text = (
            template if isinstance(template, str | None) else json.dumps(template, sort_keys=True)
        )
        facts = {
            "chat_template_sha256": text_sha256(text),
            "chat_template_kwargs": self.template_kwargs,
        }
        if self.date is not None:
            facts[KEY] = self.date.isoformat()
        return facts

    def prompt_ids(self, example: Example) -> list[int]:
        """The prompt that serving would send for the last response of `example`: its text prompt,
        or the conversation before its last assistant turn (if any) with the generation prompt."""
        if example.prompt is not None:
            return self.tokenizer(example.prompt, verbose=False)["input_ids"]
        messages = self._messages(example)
        end = len(messages) - (messages[-1]["role"] == "assistant")
        text = self._render(example, messages, end, prompt=True)
        self._require_prompt(example, messages, range(end), text)
        return self._encode(text)

    def prompt_rows(self, example: Example) -> list[TokenRow]:
        """`prompt_ids` as a row, of which nothing is supervised."""
        ids = self.prompt_ids(example)
        return [TokenRow(np.asarray(ids), np.zeros(len(ids)), example.workload)]

    def rows(self, example: Example, max_length: int | None = None) -> list[TokenRow]:
        """One row, or several where the template rewrites history; BadRow quotes the turn.

        `max_length`: the rows will be cut there, and those that this would leave without a
        supervised token may be missing."""
        if example.prompt is not None:
            return [self._completion_row(example)]
        messages = self._messages(example)
        spoken = [i for i, message in enumerate(messages) if _is_learned_answer(message)]
        if not spoken:
            raise BadRow(
                example.origin,
                "the conversation has no assistant turn to learn from (one of weight 0 is context);"
                " turn regenerate on to have the target answer it",
            )
        turns = self._turns(example, messages, spoken, max_length)
        return fewest_rows(turns, example.workload)

    # ----------------------------------------------------------------------------------- one turn

    def _turns(
        self,
        example: Example,
        messages: list[Message],
        spoken: list[int],
        max_length: int | None,
    ) -> list[Turn]:
        """The assistant turns `spoken`, as `_turns_within`. What they share is tokenised once,
        where that gives the tokens of whole texts."""
        if len(spoken) > 1:
            pieces = PiecewiseTokenizer(self.tokenizer, self._special_tokens)
            turns: list[Turn] = []
            refusal = None
            try:
                turns = self._turns_within(
                    max_length, spoken, partial(self._turn, example, messages, tokens=pieces)
                )
            except BadRow as error:
                refusal = error
            if pieces.as_whole():
                if refusal is not None:
                    raise refusal
                return turns
        whole = PiecewiseTokenizer(self.tokenizer)
        return self._turns_within(
            max_length, spoken, partial(self._turn, example, messages, tokens=whole)
        )

    def _turns_within(
        self, max_length: int | None, spoken: list[int], turn_at: Callable[[int], Turn]
    ) -> list[Turn]:
        """The turns at `spoken`, without those of which a cut at `max_length` keeps nothing.

        Those are the turns between one and the last whose first `max_length` tokens are the same:
        the turns between them have these too, and begin behind them."""
        *earlier, final = spoken
        turns = []
        last = None
        for index in earlier:
            turn = turn_at(index)
            turns.append(turn)
            if max_length is not None and len(turn.ids) > max_length:
                last = last or turn_at(final)
                if turn.ids[:max_length] == last.ids[:max_length]:
                    break
        return [*turns, last or turn_at(final)]

    def _turn(
        self, example: Example, messages: list[Message], index: int, tokens: PiecewiseTokenizer
    ) -> Turn:
        """Assistant turn `index`. BadRow: its mask cannot be proved.

        The head is all that serving would send for it, the generation prompt included; the tail
        goes on to the turn's end. `common` is how many tokens both begin with: where that is the
        whole head, the rest of the tail is the response."""
        head_text = self._render(example, messages, index, prompt=True)
        tail_text = self._render(example, messages, index + 1, prompt=False)
        refusal = partial(_refusal, example, messages, index)
        self._require_prompt(example, messages, _asked(messages, index), head_text)
        self._require_shown(example, messages, index, head_text, tail_text)
        head = tokens.encode(head_text)
        ids = tokens.encode(tail_text)
        common = _common(head, ids)
        alone = self._decode(head[common:])
        joined = self._decode(ids[common : common + 8])
        if common < len(head) and tail_text.startswith(head_text):
            raise refusal(
                f"it changes the tokens of the prompt before it, which alone ends in {alone!r} but"
                f" is followed up as {joined!r}; strip the turn's leading whitespace",
            )
        if self._marked(example):
            marks = self._marks_of_turn(example, messages, index, tail_text)
            mask = tokens.marked(tail_text, marks, common)
        elif common == len(head):
            mask = np.arange(len(ids)) >= common
        else:
            raise refusal(
                f"the template renders it unlike its own generation prompt, which ends in {alone!r}"
                f" where the turn has {joined!r} (thoughts dropped?); turn regenerate on, which"
                " needs no mask, or give data.chat_template a template with generation markers",
            )
        mask = self._close(ids, mask)
        if not mask.any():
            raise refusal("its mask is empty: the template renders no token of it")
        end = int(np.flatnonzero(mask)[-1]) + 1
        return Turn(ids[:end], mask[:end])

    def _require_prompt(
        self, example: Example, messages: list[Message], places: range, text: str
    ) -> None:
        """BadRow if the prompt `text`, which ends behind `places`, leaves out one of these turns:
        its words, or of the model's, whose thoughts and words templates may cut, its tool calls."""
        lacking = {}
        for index in places:
            message = messages[index]
            is_answer = message["role"] == "assistant"
            if missing := _not_shown(_calls_alone(message) if is_answer else message, text):
                lacking[index] = missing
        asked = [index for index in lacking if messages[index]["role"] != "assistant"]
        heard = self._heard(example, messages, asked, places.stop, text) if asked else set()
        for index, missing in lacking.items():
            if index not in heard:
                raise _refusal(
                    example,
                    messages,
                    index,
                    f"the chat template does not show its {missing} to the model; name one that"
                    " does in a recipe, as data.chat_template, or take the turn out of the data",
                )

    def _heard(
        self, example: Example, messages: list[Message], places: list[int], end: int, text: str
    ) -> set[int]:
        """Which of the turns `places` the prompt `text` depends on. A template may show their words
        in another form: as JSON, or without a switch such as /no_think. One rendering finds those
        of which it shows what is added; a turn that adds nothing to see is rendered alone."""
        added = {index: f"otherwise {index}." for index in places}
        other = self._render_changed(example, messages, added, end)
        seen = {index for index, words in added.items() if words in other and words not in text}
        for index in places:
            if index not in seen:
                alone = {index: added[index]}
                if self._render_changed(example, messages, alone, end) == text:
                    break
                seen.add(index)
        return seen

    def _render_changed(
        self, example: Example, messages: list[Message], added: Mapping[int, str], end: int
    ) -> str:
        """The prompt if the turns of `added` said these words too."""
        changed = list(messages)
        for index, words in added.items():
            changed[index] = {**messages[index], "content": f"{messages[index]['content']} {words}"}
        return self._render(example, changed, end, prompt=True)

    def _require_shown(
        self,
        example: Example,
        messages: list[Message],
        index: int,
        head_text: str,
        tail_text: str,
    ) -> None:
        """BadRow if turn `index` is empty, or if its rendering leaves out a part of it."""
        refusal = partial(_refusal, example, messages, index)
        if not says_something(messages[index]):
            raise refusal(
                "it is empty, so there is nothing to learn; turn regenerate on to have it written",
            )
        if missing := _not_shown(messages[index], tail_text[_common(head_text, tail_text) :]):
            advice = "set data.reasoning: drop, " if missing in REASONING_FIELDS else ""
            raise refusal(
                f"the chat template does not show its {missing}; {advice}use a template that does, "
                "or turn regenerate on",
            )

    def _marks_of_turn(
        self, example: Example, messages: list[Message], index: int, tail_text: str
    ) -> Any:
        """The template's marks of the conversation up to turn `index`. BadRow: it renders another
        text than before, `tail_text`."""
        marked_text, marks = self._marks(example, messages[: index + 1])
        if marked_text != tail_text:
            raise _refusal(
                example,
                messages,
                index,
                "two renderings of it differ; the template must not depend on time or chance",
            )
        return marks

    def _marks(
        self, example: Example, messages: list[Message]
    ) -> tuple[str, list[tuple[int, int]]]:
        """The text of `messages`, and what of it the template's own markers enclose: characters
        [start, end)."""
        tools: Any = list(example.tools) or None
        texts, marks = render_jinja_template(  # type: ignore[str-unpack]  # of another annotation
            [messages],
            tools=tools,
            chat_template=self.tokenizer.get_chat_template(self._template(tools), tools),
            return_assistant_tokens_mask=True,
            **{**self.tokenizer.special_tokens_map, **self.template_kwargs},
        )
        return texts[0], list(marks[0])  # type: ignore[arg-type]

    def _close(self, ids: list[int], mask: np.ndarray) -> np.ndarray:
        """Ends the mask with the end-of-turn token, which markers may have left out."""
        written = np.flatnonzero(mask)
        if not len(written):
            return mask
        end = int(written[-1]) + 1  # exclusive
        special = [i for i in written if ids[i] in self._special_ids]
        # The markers enclose the end-of-turn token, and perhaps the template's whitespace after it.
        if special and not self._decode(ids[special[-1] + 1 : end]).strip():
            end = int(special[-1]) + 1
        # They end before it.
        elif end < len(ids) and ids[end] in self._special_ids:
            end += 1
            mask[end - 1] = True
        mask[end:] = False
        return mask

    # ------------------------------------------------------------------------------------------
    # text

    def _completion_row(self, example: Example) -> TokenRow:
        """Prompt and completion, without a template or an end: a file may be cut anywhere."""
        prompt = self.prompt_ids(example)
        text = example.prompt or ""
        joint = self.tokenizer(text + (example.completion or ""), verbose=False)["input_ids"]
        if joint[: len(prompt)] != prompt:
            # The boundary is inside a token; serving has the prompt's alone.
            split = prompt + self._encode(example.completion or "")
            if self._decode(split) != self._decode(joint):
                raise BadRow(
                    example.origin,
                    "the prompt's tokens change when the completion is added, and the two do not"
                    f" join: the prompt ends in {text[-40:]!r}",
                )
            joint = split
        if len(joint) == len(prompt):
            raise BadRow(
                example.origin,
                "the completion is empty, so there is nothing to learn; turn regenerate on to have"
                " the target write it",
            )
        return TokenRow.from_response(prompt, joint[len(prompt) :], example.workload)

    def _messages(self, example: Example) -> list[Message]:
        """The messages as templates expect them: one spelling of reasoning, or none of it."""
        if example.messages[0]["role"] == "assistant":
            why = "no turn comes before it, so nothing prompts it; drop it or put a user turn first"
            raise _refusal(example, list(example.messages), 0, why)
        messages = []
        for message in example.messages:
            rest = {key: value for key, value in message.items() if key not in REASONING_FIELDS}
            thought = thought_of(message)
            if thought is not None and self.reasoning == "keep":
                rest |= dict.fromkeys(REASONING_FIELDS, thought)
            messages.append(rest)
        return messages

    def _render(self, example: Example, messages: list[Message], end: int, *, prompt: bool) -> str:
        """The first `end` messages as text, with the generation prompt if `prompt`."""
        try:
            return self._apply_template(
                example, messages[:end], add_generation_prompt=prompt, tokenize=False
            )
        except Exception as error:  # whatever a template may raise
            if self.tokenizer.chat_template is None and self.chat_template is None:
                raise DataError(
                    "the tokenizer has no chat template; put a chat_template.jinja beside it, or"
                    " name one in a recipe, as data.chat_template"
                ) from None
            why = f"the chat template refuses it: {error}"
            raise _refusal(example, messages, end - 1, why) from None

    def _apply_template(self, example: Example, messages: list[Message], **options: Any) -> Any:
        tools: Any = list(example.tools) or None
        return self.tokenizer.apply_chat_template(
            messages,
            tools=tools,
            chat_template=self._template(tools),
            **options,
            **self.template_kwargs,
        )

    def _template(self, tools: Any) -> str | None:
        """What a conversation is rendered by; None: the tokenizer's own as it is."""
        if self.date is None:
            return self.chat_template
        return dated(self.tokenizer.get_chat_template(self.chat_template, tools), self.date)

    def _encode(self, text: str) -> list[int]:
        return tokenise(self.tokenizer, text)

    def _decode(self, ids: Sequence[int]) -> str:
        return str(
            self.tokenizer.decode(
                list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )

    def _marked(self, example: Example) -> bool:
        template = self.tokenizer.get_chat_template(self.chat_template, list(example.tools) or None)
        return self.tokenizer.is_fast and bool(_MARKER.search(template))

    @cached_property
    def _special_tokens(self) -> SpecialTokens:
        return SpecialTokens(self.tokenizer)

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        added = getattr(self.tokenizer, "added_tokens_decoder", {})
        return frozenset(self.tokenizer.all_special_ids) | {
            i for i, token in added.items() if token.special
        }


def _common(a: Sequence[Any], b: Sequence[Any]) -> int:
    """Length of the longest common prefix, by halves: slices compare faster than items."""
    # Always a[:same] == b[:same], and not so for `below`.
    same = 0
    below = min(len(a), len(b)) + 1
    while below - same > 1:
        middle = (same + below) // 2
        if a[same:middle] == b[same:middle]:
            same = middle
        else:
            below = middle
    return same


def _is_learned_answer(message: Message) -> bool:
    return message["role"] == "assistant" and is_learned(message)


def _asked(messages: Sequence[Message], index: int) -> range:
    """The places of the turns that assistant turn `index` answers, behind the last one that is
    learned."""
    begin = index
    while begin and not _is_learned_answer(messages[begin - 1]):
        begin -= 1
    return range(begin, index)


def _calls_alone(message: Message) -> Message:
    """A turn of the model with its tool calls and nothing else."""
    return {"content": "", "tool_calls": message.get("tool_calls", ())}


def _not_shown(message: Message, text: str) -> str | None:
    """The first part of a turn that its rendering lacks, apart from whitespace."""
    parts = {name: message[name] for name in REASONING_FIELDS if message.get(name)} | {
        "text": message["content"]
    }
    for call in message.get("tool_calls", ()):
        parts[f"tool call {call['function']['name']}"] = call["function"]["name"]
    # Most words stand in the text as they are, and long texts are searched faster than rewritten.
    altered = {name: words for name, words in parts.items() if str(words).strip() not in text}
    shown = "".join(text.split()) if altered else ""
    return next(
        (name for name, words in altered.items() if "".join(str(words).split()) not in shown), None
    )


def _refusal(example: Example, messages: list[Message], index: int, what: str) -> BadRow:
    """The error of turn `index`, which it quotes."""
    message = messages[index]
    words = message["content"]
    quoted = repr(words if len(words) <= 100 else words[:97] + "...")
    where = f"turn {index + 1} of {len(messages)} ({message['role']}: {quoted})"
    return BadRow(example.origin, f"{where}: {what}")
