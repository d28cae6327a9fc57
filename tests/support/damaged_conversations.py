"""Conversations with many kinds of damage, and what must become of each line: the ground truth of
the data's tests.

All text is the quickstart's or written here. `damaged(count, seed)` gives lines of a JSONL file,
each with a `Truth`: the messages that must be trained on, or that the line must be reported."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle
from typing import Any

from tests.quickstart_data import rows

Messages = list[dict[str, Any]]
Line = Callable[[Messages], bytes]
BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Truth:
    """`messages`: what is trained on, as (role, text); None where the line is bad."""

    kind: str
    messages: tuple[tuple[str, str], ...] | None = None


def _row(messages: Any, **more: Any) -> bytes:
    return json.dumps({"messages": messages, **more}).encode()


def _with(messages: Messages, turn: int, **changed: Any) -> Messages:
    """The messages with keys of one turn changed; `...` takes a key away."""
    new = {k: v for k, v in (messages[turn] | changed).items() if v is not ...}
    return [new if i == turn % len(messages) else m for i, m in enumerate(messages)]


def _bare(messages: Messages) -> Messages:
    """Without a system prompt: the user's turn first."""
    return messages[1:] if messages[0]["role"] == "system" else messages


def _sharegpt(m: Messages) -> bytes:
    speaker = {"user": "human", "assistant": "gpt", "system": "system"}
    turns = [{"from": speaker[turn["role"]], "value": turn["content"]} for turn in m]
    return json.dumps({"conversations": turns}).encode()


# Lines that are to be used as they are.
WHOLE: dict[str, Line] = {
    "clean": _row,
    "spaces around": lambda m: b" \t" + _row(m) + b"  \r",
    "raw UTF-8": lambda m: json.dumps({"messages": m}, ensure_ascii=False).encode(),
    "ShareGPT's names": _sharegpt,
    "text parts": lambda m: _row(
        _with(m, -1, content=[{"type": "text", "text": m[-1]["content"]}])
    ),
    "null columns": lambda m: _row([t | {"tool_calls": None} for t in m], tools=None),
    "unknown columns": lambda m: _row(m, id=7, meta={"a": [1, 2.5]}, note="half \ud83d"),
    "a long line": lambda m: _row(m, raw="x" * 300_000),
    "an open question": lambda m: _row([*m, {"role": "user", "content": "And then?"}]),
}
# Lines that are to be reported, with or without regeneration.
BAD: dict[str, Line] = {
    "cut in the middle": lambda m: _row(m)[: len(_row(m)) // 2],
    "two rows in a line": lambda m: _row(m) + _row(m),
    "Python's quotes": lambda m: repr({"messages": m}).encode(),
    "a byte that is not UTF-8": lambda m: _row(m, x="ab").replace(b'"ab"', b'"a\xffb"'),
    "half a surrogate pair": lambda m: _row(_with(m, -2, content="a\ud83d b")),
    "nested beyond reading": lambda m: _row(m)[:-1] + b', "x": ' + b"[" * 50_000,
    "a number": lambda m: b"42",
    "no messages": lambda m: json.dumps({"text": m[-1]["content"]}).encode(),
    "no turns": lambda m: _row([]),
    "a turn that is text": lambda m: _row([*m, "and then?"]),
    "an unknown role": lambda m: _row(_with(m, -2, role="narrator")),
    "no content": lambda m: _row(_with(m, -2, content=...)),
    "an image": lambda m: _row(_with(m, -2, content=[{"type": "image_url", "image_url": "x"}])),
    "a workload that is a list": lambda m: _row(m, workload=["a"]),
    "a question of spaces": lambda m: _row(_with(m, -2, content=" \n ")),
    "only a system prompt": lambda m: _row([{"role": "system", "content": "Be brief."}]),
    "the assistant first": lambda m: _row([{"role": "assistant", "content": "Hello!"}, *_bare(m)]),
    "a tool call without a name": lambda m: _row(_with(m, -1, tool_calls=[{"function": {}}])),
    "arguments that are no JSON": lambda m: _row(
        _with(m, -1, tool_calls=[{"function": {"name": "f", "arguments": "{"}}])
    ),
    "tools that are no JSON": lambda m: _row(m, tools="{"),
}
# Lines whose answer cannot be learnt: there is none, or its mask is not proved. The target can
# write it anew.
UNPROVED: dict[str, Line] = {
    "an empty answer": lambda m: _row(_with(m, -1, content="")),
    "nobody answers": lambda m: _row([t for t in m if t["role"] != "assistant"]),
    "an answer that begins with a line end": lambda m: _row(_with(m, -1, content="\nyes")),
    "reasoning the template hides": lambda m: _row(_with(m, -1, reasoning="zzyzx because")),
}
LONG_ANSWER, CUT = "a long answer", "a long question"  # whole; of the second no answer is in reach


def damaged(count: int, seed: int = 0, *, tokens: int = 3000) -> Iterator[tuple[bytes, Truth]]:
    """`count` lines without their line ends; the first is whole and begins with a byte order mark.

    A third is whole, the other kinds are as frequent, but for two turns of some `tokens`."""
    rng = random.Random(seed)
    conversations = (list(row["messages"]) for row in rows("train", count, 97 * seed))
    kinds = cycle([*WHOLE, *BAD, *UNPROVED])
    plan = [next(kinds) if rng.random() > 1 / 3 else "clean" for _ in range(count)]
    plan[1], plan[count // 2] = LONG_ANSWER, CUT
    for number, (kind, messages) in enumerate(zip(plan, conversations)):
        if number == 0:
            yield BOM + _row(messages), _used("byte order mark", messages)
        elif kind in (LONG_ANSWER, CUT):
            text, turn = "the quick brown fox jumps. " * (tokens // 9), -(1 + (kind == CUT))
            changed = _with(messages[-2:], turn, content=text)
            yield _row(changed), _used(kind, changed)
        elif kind in WHOLE:
            yield WHOLE[kind](messages), _used(kind, messages)
        else:
            yield (BAD | UNPROVED)[kind](messages), Truth(kind)


def _used(kind: str, messages: Messages) -> Truth:
    return Truth(kind, tuple((m["role"], m["content"]) for m in messages))
