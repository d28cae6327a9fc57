"""Lines of a JSONL file by kind, and what must become of them: those of WHOLE are trained on as
MESSAGES, those of BAD are reported, those of UNPROVED too unless the target writes answers."""

from __future__ import annotations

import json
from typing import Any

BOM = b"\xef\xbb\xbf"
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Which words are missing?\n\nNone — I think."},
    {"role": "assistant", "content": "None, they are all there."},
]
SPEAKERS = {"user": "human", "assistant": "gpt", "system": "system"}


def row(messages: Any = MESSAGES, **more: Any) -> bytes:
    return json.dumps({"messages": messages, **more}).encode()


def turn(index: int, **changed: Any) -> bytes:
    """The row with keys of one turn changed; `...` takes a key away."""
    new = {k: v for k, v in (MESSAGES[index] | changed).items() if v is not ...}
    return row([new if m is MESSAGES[index] else m for m in MESSAGES])


def sharegpt() -> bytes:
    turns = [{"from": SPEAKERS[m["role"]], "value": m["content"]} for m in MESSAGES]
    return json.dumps({"conversations": turns}).encode()


WHOLE: dict[str, bytes] = {
    "clean": row(),
    "spaces around": b" \t" + row() + b"  \r",
    "raw UTF-8": json.dumps({"messages": MESSAGES}, ensure_ascii=False).encode(),
    "ShareGPT's names": sharegpt(),
    "text parts": turn(2, content=[{"type": "text", "text": MESSAGES[2]["content"]}]),
    "null columns": row([m | {"tool_calls": None} for m in MESSAGES], tools=None),
    "unknown columns": row(id=7, meta={"a": [1, 2.5]}, note="half \ud83d"),
    "a long line": row(raw="x" * 300_000),
    "an open question": row([*MESSAGES, {"role": "user", "content": "And then?"}]),
}
CALL = {"function": {"name": "f", "arguments": "{"}}
BAD: dict[str, bytes] = {
    "cut in the middle": row()[: len(row()) // 2],
    "two rows in a line": row() + row(),
    "Python's quotes": repr({"messages": MESSAGES}).encode(),
    "a byte that is not UTF-8": row(x="ab").replace(b'"ab"', b'"a\xffb"'),
    "half a surrogate pair": turn(1, content="a\ud83d b"),
    "nested beyond reading": row()[:-1] + b', "x": ' + b"[" * 50_000,
    "a number": b"42",
    "no messages": b'{"text": "a"}',
    "no turns": row([]),
    "a turn that is text": row([*MESSAGES, "and then?"]),
    "an unknown role": turn(1, role="narrator"),
    "an unknown role of many words": turn(1, role="narrator " * 20),
    "no content": turn(1, content=...),
    "a part that is a number": turn(1, content=[5]),
    "an image": turn(1, content=[{"type": "image_url", "image_url": "x"}]),
    "a workload that is a list": row(workload=["a"]),
    "a question of spaces": turn(1, content=" \n "),
    "only a system prompt": row(MESSAGES[:1]),
    "the assistant alone": row(MESSAGES[2:]),
    "a tool call without a name": turn(2, tool_calls=[{"function": {}}]),
    "arguments that are no JSON": turn(2, tool_calls=[CALL]),
    "tools that are no JSON": row(tools="{"),
}
# There is no answer, or its mask is not proved.
UNPROVED: dict[str, bytes] = {
    "an empty answer": turn(2, content=""),
    "nobody answers": row(MESSAGES[:2]),
    "an answer that begins with a line end": turn(2, content="\nyes"),
    "reasoning the template hides": turn(2, reasoning="zzyzx because"),
}
