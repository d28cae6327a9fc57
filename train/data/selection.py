"""Selects the examples that are trained on: none twice, none with an evaluation prompt.

Pure functions over lists of examples, one list per source; examples that are left out are listed
with the reason."""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from draftsmith.train.data.sources import Example, Message

Lists = list[list[Example]]
SHORTEST_QUESTION = 5  # words; a shorter turn of the evaluation may stand in any conversation
_WORD = re.compile(r"\w+")


@dataclass(frozen=True)
class LeftOut:
    """An example that is not trained on. `why`: duplicate or contaminated; `like`:
    what it repeats."""

    origin: str
    workload: str
    why: str
    like: str
    detail: str = ""


def deduplicate(
    lists: Sequence[Sequence[Example]], *, responses: bool
) -> tuple[Lists, list[LeftOut]]:
    """The first of examples with the same prompt, over all lists;
    `responses`: and the same response.

    Texts are the same if they are equal apart from case, spaces and compatibility forms of
    characters."""
    first: dict[bytes, str] = {}
    left_out: list[LeftOut] = []

    def new(example: Example) -> bool:
        digest = _digest(_said(example, responses))
        if digest in first:
            left_out.append(LeftOut(example.origin, example.workload, "duplicate", first[digest]))
            return False
        first[digest] = example.origin
        return True

    return [[example for example in some if new(example)] for some in lists], left_out


def decontaminate(
    lists: Sequence[Sequence[Example]],
    held_out: Iterable[Example],
    *,
    ngram: int | None = None,
    questions: Sequence[Example] = (),
) -> tuple[Lists, list[LeftOut]]:
    """The examples whose prompt is not in `held_out`.

    It is if the whole prompts are the same, as in `deduplicate`; with `ngram` also if a user turn
    (or a tool result, or a text to continue) has a run of so many words in common with one there.
    System prompts do not count. The prompts of `questions` are held out too, and those of five
    words and more may be no turn of an example, wherever it stands."""
    prompts: dict[bytes, str] = {}
    runs: dict[bytes, str] = {}
    asked = {
        _digest_text(text): example.origin for example in questions for text in _asked(example)
    }
    for example in (*held_out, *questions):
        prompts.setdefault(_digest(_said(example, False)), example.origin)
        for run in _runs(example, ngram):
            runs.setdefault(_digest_text(run), example.origin)
    left_out: list[LeftOut] = []

    def clean(example: Example) -> bool:
        like, shared = prompts.get(_digest(_said(example, False))), ""
        if like is None and runs:
            shared = next((run for run in _runs(example, ngram) if _digest_text(run) in runs), "")
            like = runs[_digest_text(shared)] if shared else None
        if like is None and asked:
            like = next(
                (asked[key] for key in map(_digest_text, _asked(example)) if key in asked), None
            )
        if like is not None:
            left_out.append(LeftOut(example.origin, example.workload, "contaminated", like, shared))
        return like is None

    return [[example for example in some if clean(example)] for some in lists], left_out


# ---------------------------------------------------------------------------------------------
# texts


def _said(example: Example, responses: bool) -> Iterator[tuple[str, str]]:
    """(role, normalised text) of everything before the last response; with `responses` of
    everything."""
    if example.prompt is not None:
        yield "prompt", _normalised(example.prompt)
        if responses:
            yield "completion", _normalised(example.completion or "")
        return
    messages = example.messages
    if not responses and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    for message in messages:
        yield message["role"], _normalised(_words_of(message))
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


def _runs(example: Example, ngram: int | None) -> Iterator[str]:
    """Every run of `ngram` words of the user's turns."""
    if ngram is None:
        return
    turns = [m["content"] for m in example.messages if m["role"] in ("user", "tool")]
    for text in [example.prompt] if example.prompt is not None else turns:
        words = _WORD.findall(_normalised(text))
        for start in range(len(words) - ngram + 1):
            yield " ".join(words[start : start + ngram])


def _asked(example: Example) -> Iterator[str]:
    """The user's turns of five words and more."""
    texts = [example.prompt or "", *(m["content"] for m in example.messages if m["role"] == "user")]
    return (text for text in map(_normalised, texts) if text.count(" ") >= SHORTEST_QUESTION - 1)


def _digest(said: Iterable[tuple[str, str]]) -> bytes:
    return _digest_text("\0".join(f"{role}\1{text}" for role, text in said))


def _digest_text(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
