"""Selects the examples that are trained on: none twice, none with an evaluation prompt, those of a
source as often as its weight says.

Pure functions over lists of examples, one per source; what is left out comes with a reason."""

from __future__ import annotations

import hashlib
import random
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from draftsmith.train.data.examples import Example, Message, is_learned
from draftsmith.train.recipe.data_sections import Source

Lists = list[list[Example]]
SEED = 0  # of fractions of a source
SHORTEST_QUESTION = 5  # words; a shorter turn of the evaluation may stand in any conversation


@dataclass(frozen=True)
class LeftOut:
    """An example left out. `why`: duplicate or contaminated; `like`: what it repeats."""

    origin: str
    workload: str
    why: str
    like: str


def deduplicate(
    lists: Sequence[Sequence[Example]], *, responses: bool
) -> tuple[Lists, list[LeftOut]]:
    """The first of examples with the same prompt (`responses`: and response), over all lists.

    Case, spaces and compatibility forms of characters make no difference."""
    first: dict[bytes, str] = {}
    left_out: list[LeftOut] = []

    def new(example: Example) -> bool:
        digest = _digest(_texts_of(example, responses))
        if digest in first:
            left_out.append(LeftOut(example.origin, example.workload, "duplicate", first[digest]))
            return False
        first[digest] = example.origin
        return True

    return [list(filter(new, examples)) for examples in lists], left_out


def decontaminate(
    lists: Sequence[Sequence[Example]],
    held_out: Iterable[Example],
    questions: Sequence[Example] = (),
) -> tuple[Lists, list[LeftOut]]:
    """The examples whose whole prompt is not one of `held_out` or `questions`, as in `deduplicate`;
    `questions` of five words and more may be no turn of it at all."""
    prompts = {
        _digest(_texts_of(example, False)): example.origin for example in (*held_out, *questions)
    }
    asked = {
        _digest_text(text): example.origin for example in questions for text in _asked(example)
    }
    left_out: list[LeftOut] = []

    def clean(example: Example) -> bool:
        like = prompts.get(_digest(_texts_of(example, False)))
        if like is None and asked:
            turns = map(_digest_text, _asked(example))
            like = next((asked[turn] for turn in turns if turn in asked), None)
        if like is not None:
            left_out.append(LeftOut(example.origin, example.workload, "contaminated", like))
        return like is None

    return [list(filter(clean, examples)) for examples in lists], left_out


def mix(sources: Sequence[Source], lists: Sequence[Sequence[Example]]) -> list[Example]:
    """Each example as often as its source's `weight`; a fraction is a seeded sample."""
    mixed: list[Example] = []
    for index, (source, examples) in enumerate(zip(sources, lists, strict=True)):
        whole, fraction = divmod(source.weight, 1)
        count = round(fraction * len(examples))
        chosen = random.Random(f"{SEED}/{index}").sample(range(len(examples)), count)
        mixed += list(examples) * int(whole) + [examples[i] for i in sorted(chosen)]
    return mixed


# ---------------------------------------------------------------------------------------------
# texts


def _texts_of(example: Example, responses: bool) -> Iterator[tuple[str, str]]:
    """(role, normalised text) of what precedes the last response; with `responses` of all."""
    if example.prompt is not None:
        yield "prompt", _normalised(example.prompt)
        if responses:
            yield "completion", _normalised(example.completion or "")
        return
    messages = example.messages
    if not responses and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    for message in messages:
        role = message["role"] if is_learned(message) or not responses else "context"
        yield role, _normalised(_words_of(message))
    if example.tools:
        yield "tools", _normalised(str(example.tools))


def _words_of(message: Message) -> str:
    calls = [
        f"{call['function']['name']} {call['function']['arguments']}"
        for call in message.get("tool_calls", ())
    ]
    return " ".join([message["content"], *calls])


def _normalised(text: str) -> str:
    text = text if text.isascii() else unicodedata.normalize("NFKC", text)
    return " ".join(text.casefold().split())


def _asked(example: Example) -> Iterator[str]:
    """The user's turns of five words and more."""
    texts = [example.prompt or "", *(m["content"] for m in example.messages if m["role"] == "user")]
    return (text for text in map(_normalised, texts) if text.count(" ") >= SHORTEST_QUESTION - 1)


def _digest(texts: Iterable[tuple[str, str]]) -> bytes:
    return _digest_text("\0".join(f"{role}\1{text}" for role, text in texts))


def _digest_text(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
