"""Conversations with every kind of damage, and what must become of each line: the ground truth of
the data's tests.

All text is the quickstart's or written here. `damaged(count, seed)` gives lines of a JSONL
file, each with a `Truth`: either the messages that must be trained on, or the reason it must be
reported with."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle
from typing import Any

from tests.quickstart_data import rows

Messages = list[dict[str, Any]]
LONG = "the quick brown fox jumps over the lazy dog. "


@dataclass(frozen=True)
class Truth:
    """`messages`: what is trained on, as (role, text); None where the line is bad, for `reason`."""

    kind: str
    messages: tuple[tuple[str, str], ...] | None = None
    reason: str = ""


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
    return json.dumps(
        {"conversations": [{"from": speaker[t["role"]], "value": t["content"]} for t in m]}
    ).encode()


def _deep(levels: int) -> str:
    return "[" * levels + "]" * levels


Line = Callable[[Messages], bytes]

# Lines that are to be used as if they were whole: the messages are those given, or what the second
# function makes.
WHOLE: dict[str, tuple[Line, Callable[[Messages], Messages]]] = {
    "clean": (_row, list),
    "carriage return": (lambda m: _row(m) + b"\r", list),
    "spaces around": (lambda m: b" \t" + _row(m) + b"  ", list),
    "raw UTF-8": (lambda m: json.dumps({"messages": m}, ensure_ascii=False).encode(), list),
    "ShareGPT's names": (_sharegpt, list),
    "text parts": (
        lambda m: _row(_with(m, -1, content=[{"type": "text", "text": m[-1]["content"]}])),
        list,
    ),
    "null columns": (
        lambda m: _row([t | {"tool_calls": None, "name": None} for t in m], tools=None),
        list,
    ),
    "unknown columns": (lambda m: _row(m, id=7, meta={"a": [1, {"b": 2.5}]}, score=1e300), list),
    "other metadata broken": (lambda m: _row(m, source="half \ud83d", note="nul \0"), list),
    "a long line": (lambda m: _row(m, raw="x" * 300_000), list),
    "nested, not too deeply": (lambda m: _row(m)[:-1] + f', "x": {_deep(200)}}}'.encode(), list),
    "NUL in a text": (
        lambda m: _row(_with(m, -1, content="a\0b " + m[-1]["content"])),
        lambda m: _with(m, -1, content="a\0b " + m[-1]["content"]),
    ),
    "a surrogate pair": (
        lambda m: _row(_with(m, -1, content="so \U0001f642 @@")).replace(b"@@", b"\\ud83d\\ude42"),
        lambda m: _with(m, -1, content="so \U0001f642 \U0001f642"),
    ),
    "line separators": (
        lambda m: json.dumps(
            {"messages": _with(m, -1, content="a\u2028b\u0085c\u000bd")}, ensure_ascii=False
        ).encode(),
        lambda m: _with(m, -1, content="a\u2028b\u0085c\u000bd"),
    ),
    "an empty system prompt": (
        lambda m: _row([{"role": "system", "content": ""}, *_bare(m)]),
        lambda m: [{"role": "system", "content": ""}, *_bare(m)],
    ),
    "an open question": (
        lambda m: _row([*m, {"role": "user", "content": "And then?"}]),
        list,
    ),
}

_CALL = {"role": "assistant", "content": None}

# Lines that are to be reported, with their reason.
BAD: dict[str, tuple[Line, str]] = {
    "cut in the middle": (lambda m: _row(m)[: len(_row(m)) // 2], "not_json"),
    "a trailing comma": (lambda m: _row(m)[:-1] + b",}", "not_json"),
    "Python's quotes": (lambda m: repr({"messages": m}).encode(), "not_json"),
    "two rows in a line": (lambda m: _row(m) + _row(m), "not_json"),
    "no JSON at all": (lambda m: m[-1]["content"].replace("\n", " ").encode() + b" x", "not_json"),
    "NaN": (lambda m: _row(m, score=float("nan")), "not_json"),
    "Infinity": (lambda m: _row(m, score=float("-inf")), "not_json"),
    "endless digits": (lambda m: _row(m)[:-1] + b', "n": ' + b"9" * 5000 + b"}", "not_json"),
    "raw NUL bytes": (lambda m: b"\0" * 40, "not_json"),
    "a raw control character": (
        lambda m: _row(m).replace(b'"content": "', b'"content": "\x01', 1),
        "not_json",
    ),
    "a byte that is not UTF-8": (
        lambda m: _row(m, x="ab").replace(b'"ab"', b'"a\xffb"'),
        "not_utf8",
    ),
    "Latin-1": (lambda m: _row(m, x="caf").replace(b'"caf"', b'"caf\xe9"'), "not_utf8"),
    "a surrogate as UTF-8": (
        lambda m: _row(m, x="ab").replace(b'"ab"', b'"a\xed\xa0\x80b"'),
        "not_utf8",
    ),
    "UTF-16": (
        lambda m: _row(m).decode().encode("utf-16-be").replace(b"\n", b" ") + b"\xff",
        "not_utf8",
    ),
    "half a surrogate pair": (lambda m: _row(_with(m, -1, content="a\ud83d b")), "lone_surrogate"),
    "half a pair in the question": (
        lambda m: _row(_with(m, -2, content="\udc00")),
        "lone_surrogate",
    ),
    "half a pair in an extra key": (lambda m: _row(_with(m, -1, name="\ud800")), "lone_surrogate"),
    "a column twice": (lambda m: _row(m)[:-1] + b', "messages": []}', "duplicate_key"),
    "a turn's key twice": (
        lambda m: _row(m).replace(b'"role": "user"', b'"role": "user", "role": "user"'),
        "duplicate_key",
    ),
    "nested beyond reading": (
        lambda m: _row(m)[:-1] + f', "x": {_deep(50_000)}}}'.encode(),
        "too_deep",
    ),
    "a number": (lambda m: b"42", "wrong_type"),
    "a text": (lambda m: json.dumps(m[-1]["content"]).encode(), "wrong_type"),
    "null": (lambda m: b"null", "wrong_type"),
    "a list of messages": (lambda m: json.dumps(m).encode(), "wrong_type"),
    "an empty mapping": (lambda m: b"{}", "missing_column"),
    "no messages": (lambda m: json.dumps({"text": m[-1]["content"]}).encode(), "missing_column"),
    "messages null": (lambda m: _row(None), "missing_column"),
    "messages a text": (lambda m: _row(m[-1]["content"]), "wrong_type"),
    "messages a mapping": (lambda m: _row({"0": m[0]}), "wrong_type"),
    "no turns": (lambda m: _row([]), "empty_turn"),
    "a turn that is text": (lambda m: _row([*m, "and then?"]), "wrong_type"),
    "a turn that is null": (lambda m: _row([None, *m]), "wrong_type"),
    "nested turns": (lambda m: _row([m]), "wrong_type"),
    "no role": (lambda m: _row(_with(m, -1, role=...)), "unknown_role"),
    "a role null": (lambda m: _row(_with(m, -2, role=None)), "unknown_role"),
    "a role that is a number": (lambda m: _row(_with(m, -2, role=1)), "unknown_role"),
    "a role that is a mapping": (
        lambda m: _row(_with(m, -2, role={"name": "user"})),
        "unknown_role",
    ),
    "an unknown role": (lambda m: _row(_with(m, -1, role="narrator")), "unknown_role"),
    "no content": (lambda m: _row(_with(m, -2, content=...)), "wrong_type"),
    "content null": (lambda m: _row(_with(m, -1, content=None)), "wrong_type"),
    "content a number": (lambda m: _row(_with(m, -1, content=3.5)), "wrong_type"),
    "content true": (lambda m: _row(_with(m, -2, content=True)), "wrong_type"),
    "content a mapping": (lambda m: _row(_with(m, -2, content={"text": "hi"})), "wrong_type"),
    "content nested lists": (lambda m: _row(_with(m, -1, content=[["hi"]])), "wrong_type"),
    "content an image": (
        lambda m: _row(_with(m, -2, content=[{"type": "image_url", "image_url": "x"}])),
        "wrong_type",
    ),
    "reasoning a number": (lambda m: _row(_with(m, -1, reasoning_content=1)), "wrong_type"),
    "a workload that is a list": (lambda m: _row(m, workload=["a"]), "wrong_type"),
    "a system column that is a number": (lambda m: _row(_bare(m), system=5), "wrong_type"),
    "an empty question": (lambda m: _row(_with(m, -2, content="")), "empty_turn"),
    "a question of spaces": (lambda m: _row(_with(m, -2, content=" \n ")), "empty_turn"),
    "an empty answer": (lambda m: _row(_with(m, -1, content="")), "empty_turn"),
    "an empty answer before others": (
        lambda m: _row(
            [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": ""}, *_bare(m)]
        ),
        "empty_turn",
    ),
    "only a system prompt": (
        lambda m: _row([{"role": "system", "content": "Be brief."}]),
        "no_conversation",
    ),
    "nobody answers": (lambda m: _row([t for t in m if t["role"] != "assistant"]), "no_response"),
    "the assistant first": (
        lambda m: _row([{"role": "assistant", "content": "Hello!"}, *_bare(m)]),
        "assistant_first",
    ),
    "tool calls as text": (lambda m: _row(_with(m, -1, tool_calls="f()")), "bad_tool_call"),
    "a tool call without a name": (
        lambda m: _row(_with(m, -1, tool_calls=[{"function": {}}])),
        "bad_tool_call",
    ),
    "a tool call that is a list": (
        lambda m: _row(_with(m, -1, tool_calls=[{"function": ["f"]}])),
        "bad_tool_call",
    ),
    "arguments that are not JSON": (
        lambda m: _row(_with(m, -1, tool_calls=[{"function": {"name": "f", "arguments": "{"}}])),
        "bad_tool_call",
    ),
    "arguments that are a list": (
        lambda m: _row(_with(m, -1, tool_calls=[{"name": "f", "arguments": "[1]"}])),
        "bad_tool_call",
    ),
    "tools that are not JSON": (lambda m: _row(m, tools="{"), "bad_tool_call"),
    "tools that are numbers": (lambda m: _row(m, tools=[1]), "bad_tool_call"),
    # The masks': what the template or the tokenizer of the embedded target makes of whole rows.
    "an answer that begins with a line end": (
        lambda m: _row(_with(m, -1, content="\nyes")),
        "boundary",
    ),
    "a tool call the template hides": (
        lambda m: _row(_with(m, -1, **_CALL, tool_calls=[{"name": "look_up", "arguments": "{}"}])),
        "not_shown",
    ),
    "reasoning the template hides": (
        lambda m: _row(_with(m, -1, reasoning="zzyzx because")),
        "not_shown",
    ),
}
LONG_ANSWER, CUT = "a long answer", "a long question"  # whole; of the second no answer is in reach


def damaged(
    count: int, seed: int = 0, *, clean: float = 0.3, long: int = 4, tokens: int = 100_000
) -> Iterator[tuple[bytes, Truth]]:
    """`count` lines without their line ends; the first is whole and begins with a byte order mark.

    A share `clean` is whole as it is, and of the others every kind is as frequent, but for those
    with a turn of some `tokens` tokens, of which there are `long` with it as the answer and as many
    with it as the question."""
    rng = random.Random(seed)
    made = (row["messages"] for row in rows("train", count, 97 * seed))
    kinds = cycle(kind for kind in [*WHOLE, *BAD] if kind != "clean")
    plan = [next(kinds) if rng.random() >= clean else "clean" for i in range(count)]
    for place, kind in enumerate([LONG_ANSWER, CUT] * long):
        plan[1 + place * (count - 1) // (2 * long)] = kind
    for number, (kind, messages) in enumerate(zip(plan, made)):
        if number == 0:
            yield b"\xef\xbb\xbf" + _row(messages), _used("byte order mark", list(messages))
        elif kind in (LONG_ANSWER, CUT):
            text, place = LONG * (tokens // 17), -1 if kind == LONG_ANSWER else -2
            changed = _with(list(messages[-2:]), place, content=text)
            yield _row(changed), _used(kind, changed)
        elif kind in WHOLE:
            line, then = WHOLE[kind]
            yield line(list(messages)), _used(kind, then(list(messages)))
        else:
            line, reason = BAD[kind]
            yield line(list(messages)), Truth(kind, reason=reason)


def _used(kind: str, messages: Messages) -> Truth:
    return Truth(kind, messages=tuple((m["role"], m["content"]) for m in messages))
