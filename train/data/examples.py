"""One row of a file or data set as an example.

A row may be written as OpenAI messages, ShareGPT turns, a prompt and its completion, or in columns
of any name; every kind ends as the same `Example`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from draftsmith.train.data.bad_rows import BadRow

Message = dict[str, Any]

# ShareGPT's speakers, and the spellings its descendants use, as OpenAI's roles.
_SPEAKERS = {
    "system": ("system", "developer"),
    "user": ("human", "user"),
    "assistant": ("gpt", "assistant", "chatgpt", "bing", "bard"),
    "tool": ("tool", "function", "observation", "ipython"),
}
_ROLES = {name: role for role, names in _SPEAKERS.items() for name in names}
REASONING_FIELDS = ("reasoning_content", "reasoning")
ESCAPED = 0xDC00  # what "surrogateescape" adds to a byte that is not UTF-8
WEIGHTS = ("weight", "train")  # of a turn, in OpenAI's files and axolotl's
QUOTED = 20  # characters before text that is no Unicode


@dataclass(frozen=True)
class Example:
    """A conversation (`messages`, each with a role and content as text), or a text with its
    continuation (`prompt`, `completion`).

    `origin` says in errors where it came from, such as `chats.jsonl:12`. An empty completion, or a
    conversation that ends with the user, awaits its response."""

    workload: str
    origin: str
    messages: tuple[Message, ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    prompt: str | None = None
    completion: str | None = None


def parse_row(
    row: Any,
    *,
    origin: str,
    workload: str | None = None,
    default_workload: str = "default",
    columns: Mapping[str, str] | None = None,
) -> Example:
    """One row of a file or dataset as an Example; keys with null values (columns filled up by
    Arrow) count as absent. Raises BadRow for a damaged one.

    `workload` overrides the row's own `workload` column, which overrides `default_workload`;
    `columns` names the columns where they have names of their own."""
    try:
        if not isinstance(row, Mapping):
            raise ValueError(f"expected a mapping, got {_quote(row)}")
        row = {str(key): value for key, value in row.items() if value is not None}
        if columns is not None:
            row = _renamed(row, columns)
        named = _text(row.get("workload", ""), "workload")
        return _example(row, origin, workload or named or default_workload)
    except RecursionError:
        raise BadRow(origin, "nested too deeply to be read") from None
    except ValueError as error:  # of JSON in a column, and of text that is no Unicode, as well
        raise BadRow(origin, str(error)) from None


# ------------------------------------------------------- one row; each raises ValueError


def _example(row: Mapping[str, Any], origin: str, workload: str) -> Example:
    kind = next((key for key in ("messages", "conversations", "prompt") if key in row), None)
    if kind is None:
        raise ValueError(
            f"the row has no messages, conversations or prompt, but {_quote(list(row))}"
            "; give the columns these names, or name them as `columns` of the source in a recipe"
        )
    if kind == "prompt":
        prompt, completion = (_text(row.get(key, ""), key) for key in ("prompt", "completion"))
        if not prompt:
            raise ValueError("the prompt is empty")
        return Example(workload, origin, prompt=prompt, completion=completion)
    messages = _messages(row[kind], kind)
    system = _text(row.get("system", ""), "system")
    if messages[0]["role"] != "system" and system:
        messages = [{"role": "system", "content": system}, *messages]
    return Example(workload, origin, messages=tuple(messages), tools=_tools(row.get("tools")))


def _renamed(row: Mapping[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    """The row under the names that `_example` knows."""
    named = {ours: row[theirs] for ours, theirs in columns.items() if theirs in row}
    layout = next(name for name in ("messages", "user", "prompt") if name in columns)
    if layout not in named:
        raise ValueError(
            f"no column {columns[layout]!r}, which columns.{layout} names, in {_quote(list(row))}"
        )
    named = {name: row[name] for name in ("tools", "workload") if name in row} | named
    if layout != "user":
        return named
    question = _text(named["user"], columns["user"])
    if more := _text(named.get("input", ""), columns.get("input", "")).strip():
        question = f"{question}\n\n{more}"
    turns = [{"role": "user", "content": question}]
    if "assistant" in named:
        turns.append({"role": "assistant", "content": named["assistant"]})
        if named.get("reasoning"):
            turns[-1]["reasoning_content"] = named["reasoning"]
    return {**named, "messages": turns}


def _messages(turns: Any, kind: str) -> list[Message]:
    if not isinstance(turns, list) or not turns:
        raise ValueError(f"expected {kind} to be a non-empty list of turns, got {_quote(turns)}")
    messages = [_message(turn, f"turn {i} of {len(turns)}") for i, turn in enumerate(turns, 1)]
    if all(message["role"] == "system" for message in messages):
        raise ValueError(f"none of its {len(turns)} turns is the user's or the assistant's")
    for i, message in enumerate(messages, 1):
        to_be_written = i == len(messages) and message["role"] == "assistant"
        spoken = message["role"] in ("user", "assistant") and not to_be_written
        if spoken and not says_something(message):
            raise ValueError(
                f"turn {i} of {len(turns)} ({message['role']}) is empty, so that what follows"
                " answers nothing"
            )
    return messages


def _message(turn: Any, where: str) -> Message:
    if not isinstance(turn, Mapping):
        raise ValueError(f"{where}: expected a mapping, got {_quote(turn)}")
    turn = _clean(turn)
    sharegpt = "from" in turn and "role" not in turn
    speaker, text = ("from", "value") if sharegpt else ("role", "content")
    role = _ROLES.get(turn[speaker]) if isinstance(turn.get(speaker), str) else None
    if role is None:
        raise ValueError(f"{where}: unknown {speaker} {_quote(turn.get(speaker))}")
    calls = turn.get("tool_calls") or []
    if not isinstance(calls, list):
        raise ValueError(f"{where}: expected tool_calls to be a list, got {_quote(calls)}")
    content = turn.get(text, "" if calls else None)
    if isinstance(content, list) and all(map(_is_text_part, content)):
        # as servers hand them to templates
        content = "\n".join(part if isinstance(part, str) else part["text"] for part in content)
    rest = {k: v for k, v in turn.items() if k not in (speaker, text, "tool_calls")}
    for name in REASONING_FIELDS:
        _text(rest.get(name, ""), f"{where} ({role}): {name}")
    for name in WEIGHTS if role == "assistant" else ():
        _weight(rest.get(name, 1), f"{where} ({role}): {name}")
    message = {**rest, "role": role, "content": _text(content, f"{where} ({role}): {text}")}
    return message | ({"tool_calls": [_tool_call(call, where) for call in calls]} if calls else {})


def _is_text_part(part: Any) -> bool:
    """True for one of OpenAI's text parts, or plain text; only text is trained on."""
    if isinstance(part, str):
        return True
    is_text = isinstance(part, Mapping) and part.get("type") == "text"
    return is_text and isinstance(part.get("text"), str)


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    """A tool call with its arguments as a mapping, as templates take it; OpenAI sends JSON."""
    function = call.get("function", call) if isinstance(call, Mapping) else {}
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError(f"{where}: expected a tool call with a function name, got {_quote(call)}")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        arguments = _from_json(arguments or "{}", f"{where}: the arguments of {function['name']}")
    if not isinstance(arguments, Mapping):
        raise ValueError(f"{where}: expected arguments as a mapping, got {_quote(arguments)}")
    called = {**function, "arguments": arguments}
    if "function" in call:
        return {**call, "function": called}
    return {"type": "function", "function": called}


def _tools(tools: Any) -> tuple[dict[str, Any], ...]:
    if isinstance(tools, str):  # data sets whose columns hold no free-form schemas
        tools = _from_json(tools or "[]", "tools") or []
    else:
        tools = _clean(tools or [])
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError(f"expected tools to be a list of JSON schemas, got {_quote(tools)}")
    return tuple(tools)


def _from_json(text: str, what: str) -> Any:
    """Its nulls stay, as a server hands them to the template; those of a column may be of Arrow,
    which fills up what a row has not."""
    try:
        value = json.loads(text)
        _clean(value)
        return value
    except json.JSONDecodeError as error:
        raise ValueError(f"{what} are not JSON: {error}") from None


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{what}: expected text, got {_quote(value)}")
    return _clean(value)


def _weight(value: Any, what: str) -> None:
    """Columns have it as a number of any kind, or as true and false."""
    if not (isinstance(value, int | float) and value in (0, 1)):
        raise ValueError(
            f"{what}: expected 1 (true), or 0 (false) for a turn that is context alone, got"
            f" {_quote(value)}"
        )


def _clean(value: Any) -> Any:
    """`value` without null entries; ValueError: text that is no Unicode."""
    if isinstance(value, str):
        if not value.isascii():
            _require_unicode(value)
        return value
    if isinstance(value, Mapping):
        return {_clean(str(k)): _clean(v) for k, v in value.items() if v is not None}
    return [_clean(item) for item in value] if isinstance(value, list | tuple) else value


def _require_unicode(text: str) -> None:
    """ValueError if UTF-8 has no bytes for the text: it was read from a file in another encoding,
    whose bytes are escaped in it, or it has half a surrogate pair."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        surrogate = ord(text[error.start])
        place = f"behind {_quote(text[max(error.start - QUOTED, 0) : error.start])}"
        if surrogate - ESCAPED in range(0x80, 0x100):
            raise ValueError(
                f"text that is not UTF-8: the byte {surrogate - ESCAPED:#x} {place}; save the"
                " file as UTF-8"
            ) from None
        raise ValueError(
            f"text that is no Unicode: half a surrogate pair, \\u{surrogate:x}, {place}; write the"
            " whole character, or leave it out"
        ) from None


def thought_of(message: Message) -> str | None:
    """The reasoning of a message under any of its names."""
    return next((message[name] for name in REASONING_FIELDS if message.get(name)), None)


def is_learned(message: Message) -> bool:
    """False for an assistant turn that its data marks as context alone."""
    return message["role"] != "assistant" or all(message.get(name, 1) for name in WEIGHTS)


def without_weights(example: Example) -> Example:
    """The example with every turn learned, as where the target writes the responses."""
    messages = (
        {key: value for key, value in message.items() if key not in WEIGHTS}
        for message in example.messages
    )
    return replace(example, messages=tuple(messages))


def says_something(message: Message) -> bool:
    """True if a message has text, tool calls or reasoning."""
    return bool(message["content"].strip() or message.get("tool_calls") or thought_of(message))


def _quote(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."
