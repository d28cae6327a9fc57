"""Examples from files and the Hub, mixed as the recipe says.

A row may be written as OpenAI messages, ShareGPT turns, a prompt and its completion, or in columns
of any name; every kind ends as the same `Example`. `train.data.readers` reads the files."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from speculators.errors import DataError
from train.data.bad_rows import BadRow, BadRows
from train.data.readers import rows_of
from train.recipe.data_sections import Source

Message = dict[str, Any]

# ShareGPT's speakers, and the spellings its descendants use, as OpenAI's roles.
_ROLES = {
    "system": "system",
    "developer": "developer",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "ipython": "tool",
}
REASONING_FIELDS = ("reasoning_content", "reasoning")


@dataclass(frozen=True)
class Example:
    """A conversation (`messages`, each with a role and content as text), or a text with its
    continuation (`prompt`, `completion`).

    `origin` says in errors where it came from, such as `chats.jsonl:12`. A completion may be empty,
    and a conversation may end with the user: both are prompts whose response is still to be
    written."""

    workload: str
    origin: str
    messages: tuple[Message, ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    prompt: str | None = None
    completion: str | None = None


def load_sources(
    sources: Sequence[Source], *, seed: int = 0, bad: BadRows | None = None
) -> list[Example]:
    """The examples of all sources, in order, as often as the mixture wants each.

    A damaged row goes to `bad`; without one it raises.
    """
    return mix(sources, read_sources(sources, seed=seed, bad=bad), seed=seed)


def read_sources(
    sources: Sequence[Source], *, seed: int = 0, bad: BadRows | None = None
) -> list[list[Example]]:
    """The examples of each source, at most its `limit`. DataError for a source without any."""
    lists = []
    for source in sources:
        before = bad.count() if bad else 0
        lists.append(list(islice(load_source(source, seed=seed, bad=bad), source.limit)))
        if not lists[-1]:
            lost = (
                f": all of its {bad.count() - before} rows are bad, {bad}"
                if bad and bad.count() > before
                else ""
            )
            raise DataError(f"{source.label}: the source holds no examples{lost}")
    return lists


def mix(
    sources: Sequence[Source], lists: Sequence[Sequence[Example]], *, seed: int = 0
) -> list[Example]:
    """Each example as often as its source is used; the fraction of a time is a sample drawn by
    `seed`."""
    examples: list[Example] = []
    times = times_used(sources, list(map(len, lists)))
    for index, (some, uses) in enumerate(zip(lists, times)):
        whole, fraction = divmod(uses, 1)
        chosen = random.Random(f"{seed}/{index}").sample(
            range(len(some)), round(fraction * len(some))
        )
        examples += list(some) * int(whole) + [some[i] for i in sorted(chosen)]
    return examples


def times_used(sources: Sequence[Source], counts: Sequence[int]) -> list[float]:
    """Uses of an example of each source, of which there are `counts`: its `weight`, or what follows
    from its `share` of the largest mixture without repetition."""
    total = min((n / source.share for source, n in zip(sources, counts) if source.share), default=0)
    return [
        source.weight if source.share is None else min(round(source.share * total) / max(n, 1), 1.0)
        for source, n in zip(sources, counts)
    ]


def load_source(source: Source, *, seed: int = 0, bad: BadRows | None = None) -> Iterator[Example]:
    """Examples of one source as they come, before `limit` and `weight`; `seed`: of a stream's
    shuffle buffer.

    A damaged row goes to `bad`; without one it raises.
    """
    source = source.resolved()
    rows, default = rows_of(source, seed=seed), Path(source.path or source.name or "").stem
    names = {"workload": source.workload, "default_workload": default, "field": source.field}
    for origin, row in rows:
        if bad is not None:
            bad.read += 1
        try:
            if isinstance(row, BadRow):
                raise row
            yield parse_row(row, origin=origin, columns=source.columns, **names)
        except BadRow as error:
            if bad is None:
                raise
            bad.refuse(error)


def parse_row(
    row: Any,
    *,
    origin: str,
    workload: str | None = None,
    default_workload: str = "default",
    field: str = "auto",
    columns: Mapping[str, str] | None = None,
) -> Example:
    """One row of a file or dataset as an Example; keys with null values (columns filled up by
    Arrow) count as absent. Raises BadRow for a damaged one.

    `workload` overrides the row's own `workload` column, which overrides `default_workload`;
    `columns` names the columns where they have other names than `field` knows."""
    try:
        return _example(row, origin, workload or None, default_workload, field, columns)
    except RecursionError:
        raise BadRow(origin, "too_deep", "nested too deeply to be read") from None
    except BadRow as error:
        raise BadRow(origin, error.reason, error.what) from None


# ---------------------------------------------------------------------------------------- one row


def _bad(reason: str, what: str) -> BadRow:
    return BadRow("", reason, what)  # `parse_row` adds the place


def _example(
    row: Any,
    origin: str,
    workload: str | None,
    default_workload: str,
    field: str,
    columns: Mapping[str, str] | None,
) -> Example:
    if not isinstance(row, Mapping):
        raise _bad(
            "wrong_type",
            f"expected a mapping with messages, conversations or prompt, got {_quote(row)}",
        )
    row = {str(key): value for key, value in row.items() if value is not None}
    if columns is not None:
        row, field = _renamed(row, columns)
    label = (
        workload
        or _text(row.get("workload", default_workload), "workload as text")
        or default_workload
    )
    keys = {"messages": "messages", "conversations": "conversations", "completion": "prompt"}
    kind = field if field != "auto" else next((k for k, key in keys.items() if key in row), None)
    if kind is None or keys[kind] not in row:
        wanted = "messages, conversations or prompt" if kind is None else keys[kind]
        what = (
            f"the row has no {wanted}; its keys are {_names(row)} (data.*.columns gives columns"
            " other names)"
        )
        raise _bad("missing_column", what)
    if kind == "completion":
        prompt, completion = row["prompt"], row.get("completion", "")
        if not (isinstance(prompt, str) and isinstance(completion, str) and prompt):
            what = f"expected prompt and completion as text, got {_quote([prompt, completion])}"
            raise _bad("empty_turn" if prompt == "" else "wrong_type", what)
        wanted = "prompt and completion as text"
        return Example(
            label, origin, prompt=_text(prompt, wanted), completion=_text(completion, wanted)
        )
    messages = _messages(row[kind], kind)
    system = _text(row.get("system", ""), "system as text")
    if messages[0]["role"] != "system" and system:
        messages = [{"role": "system", "content": system}, *messages]
    return Example(label, origin, messages=tuple(messages), tools=_tools(row.get("tools")))


def _renamed(row: Mapping[str, Any], columns: Mapping[str, str]) -> tuple[dict[str, Any], str]:
    """The row under the names that `field` knows, and the field."""
    named = {ours: row[theirs] for ours, theirs in columns.items() if theirs in row}
    layout = next(name for name in ("messages", "user", "prompt") if name in columns)
    if layout not in named:
        what = (
            f"the row has no column {columns[layout]!r}, which columns.{layout} names; it has"
            f" {_names(row)}"
        )
        raise _bad("missing_column", what)
    named = {name: row[name] for name in ("tools", "workload") if name in row} | named
    if layout == "prompt":
        return named, "completion"
    if layout == "messages":
        return named, "messages"
    question = _text(named["user"], f"text in column {columns['user']}")
    if more := _text(named.get("input", ""), f"text in column {columns.get('input')}").strip():
        question = f"{question}\n\n{more}"
    turns = [{"role": "user", "content": question}]
    if "assistant" in named:
        turns.append({"role": "assistant", "content": named["assistant"]})
        if named.get("reasoning"):
            turns[-1]["reasoning_content"] = named["reasoning"]
    return {**named, "messages": turns}, "messages"


def _messages(turns: Any, kind: str) -> list[Message]:
    if not isinstance(turns, list) or not turns:
        reason = "empty_turn" if turns == [] else "wrong_type"
        raise _bad(reason, f"expected {kind} to be a non-empty list of turns, got {_quote(turns)}")
    messages = [_message(turn, f"turn {i} of {len(turns)}") for i, turn in enumerate(turns, 1)]
    if all(message["role"] == "system" for message in messages):
        raise _bad(
            "no_conversation", f"none of its {len(turns)} turns is the user's or the assistant's"
        )
    for i, message in enumerate(messages, 1):
        last_answer = (
            i == len(messages) and message["role"] == "assistant"
        )  # may be still to be written
        if (
            message["role"] in ("user", "assistant")
            and not last_answer
            and not says_something(message)
        ):
            what = (
                f"turn {i} of {len(turns)} ({message['role']}) is empty, so that what follows"
                " answers nothing"
            )
            raise _bad("empty_turn", what)
    return messages


def _message(turn: Any, where: str) -> Message:
    if not isinstance(turn, Mapping):
        raise _bad("wrong_type", f"{where}: expected a mapping, got {_quote(turn)}")
    turn = _clean(turn, where)
    speaker, text = (
        ("from", "value") if "from" in turn and "role" not in turn else ("role", "content")
    )
    role = _ROLES.get(turn[speaker]) if isinstance(turn.get(speaker), str) else None
    if role is None:
        what = (
            f"{where}: unknown {speaker} {_quote(turn.get(speaker))}; expected one of"
            f" {', '.join(_ROLES)}"
        )
        raise _bad("unknown_role", what)
    calls = turn.get("tool_calls") or []
    if not isinstance(calls, list):
        raise _bad(
            "bad_tool_call", f"{where}: expected tool_calls to be a list, got {_quote(calls)}"
        )
    content = turn.get(text, "" if calls else None)
    if isinstance(content, list) and all(map(_is_text_part, content)):
        content = "\n".join(part["text"] for part in content)  # as servers hand them to templates
    elif isinstance(content, list) and (
        kinds := sorted({str(p["type"]) for p in content if _is_other_part(p)})
    ):
        raise _bad(
            "wrong_type",
            f"{where} ({role}): parts of type {', '.join(kinds)}; only text is trained on",
        )
    rest = {k: v for k, v in turn.items() if k not in (speaker, text, "tool_calls")}
    for name, value in {
        text: content,
        **{name: rest.get(name, "") for name in REASONING_FIELDS},
    }.items():
        if not isinstance(value, str):
            raise _bad(
                "wrong_type", f"{where} ({role}): expected text in '{name}', got {_quote(value)}"
            )
    message = {**rest, "role": role, "content": content}
    return message | ({"tool_calls": [_tool_call(call, where) for call in calls]} if calls else {})


def _is_text_part(part: Any) -> bool:
    """True for one of OpenAI's text parts; only text is trained on."""
    return (
        isinstance(part, Mapping)
        and part.get("type") == "text"
        and isinstance(part.get("text"), str)
    )


def _is_other_part(part: Any) -> bool:
    """True for an image, and the like."""
    return isinstance(part, Mapping) and part.get("type", "text") != "text"


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    """A tool call with its arguments as a mapping: OpenAI sends them as JSON text, templates want
    the mapping."""
    function = call.get("function", call) if isinstance(call, Mapping) else {}
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise _bad(
            "bad_tool_call",
            f"{where}: expected a tool call with a function name, got {_quote(call)}",
        )
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        arguments = _from_json(arguments, f"{where}: the arguments of {function['name']} are")
    if not isinstance(arguments, Mapping):
        what = (
            f"{where}: expected the arguments of {function['name']} to be a mapping, got"
            f" {_quote(arguments)}"
        )
        raise _bad("bad_tool_call", what)
    called = {**function, "arguments": arguments}
    return (
        {**call, "function": called}
        if "function" in call
        else {"type": "function", "function": called}
    )


def _tools(tools: Any) -> tuple[dict[str, Any], ...]:
    if isinstance(
        tools, str
    ):  # datasets whose columns cannot hold free-form schemas carry them as JSON text
        tools = _from_json(tools or "[]", "tools are")
    tools = _clean(tools, "tools")
    if not isinstance(tools or [], list) or not all(isinstance(tool, dict) for tool in tools or []):
        raise _bad(
            "bad_tool_call", f"expected tools to be a list of JSON schemas, got {_quote(tools)}"
        )
    return tuple(tools or ())


def _from_json(text: str, what: str) -> Any:
    try:
        return _clean(json.loads(text), what)
    except ValueError as error:
        raise _bad("bad_tool_call", f"{what} not JSON: {error}") from None


def _text(value: Any, wanted: str) -> str:
    if not isinstance(value, str):
        raise _bad("wrong_type", f"expected {wanted}, got {_quote(value)}")
    return _clean(value, wanted)


def _clean(value: Any, where: str) -> Any:
    """`value` without null entries; BadRow if there is text in it that no tokenizer takes."""
    if isinstance(value, str):
        if not value.isascii() and (half := _SURROGATE.search(value)):
            what = (
                f"{where}: {half.group()!r} at character {half.start() + 1} is half of a surrogate"
                " pair"
            )
            raise _bad("lone_surrogate", what)
        return value
    if isinstance(value, Mapping):
        return {_clean(str(k), where): _clean(v, where) for k, v in value.items() if v is not None}
    return [_clean(item, where) for item in value] if isinstance(value, list | tuple) else value


_SURROGATE = re.compile("[\ud800-\udfff]")


def thought_of(message: Message) -> str | None:
    """The reasoning of a message under any of its names."""
    return next((message[name] for name in REASONING_FIELDS if message.get(name)), None)


def says_something(message: Message) -> bool:
    return bool(message["content"].strip() or message.get("tool_calls") or thought_of(message))


def _quote(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."


def _names(row: Mapping[str, Any]) -> str:
    """The keys of a row, long ones cut."""
    names = (name.encode("utf-8", "backslashreplace").decode() for name in row)
    return ", ".join(name if len(name) <= 40 else name[:37] + "..." for name in names) or "none"
