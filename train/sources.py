"""Where examples come from: files, the hub, the built-in generators; every kind ends as the same `Example`.

Also the one place that knows how other people write conversations down (OpenAI messages, ShareGPT, prompt and
completion). Must not know: tokenizers, templates, masks.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speculators.errors import DataError
from train.recipe_data import Source

Message = dict[str, Any]

# ShareGPT's speakers, and the spellings its descendants use, as OpenAI's roles.
_ROLES = {
    "system": "system", "developer": "developer",
    "human": "user", "user": "user",
    "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant", "bing": "assistant",
    "bard": "assistant",
    "tool": "tool", "function": "tool", "observation": "tool", "ipython": "tool",
}  # fmt: skip
REASONING_FIELDS = ("reasoning_content", "reasoning")


@dataclass(frozen=True)
class Example:
    """A conversation (`messages`), or a text with its continuation (`prompt`, `completion`).

    `origin` says in errors where it came from, such as `chats.jsonl:12`. A completion may be empty, and a
    conversation may end with the user: both are prompts whose response is still to be written.
    """

    workload: str
    origin: str
    messages: tuple[Message, ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    prompt: str | None = None
    completion: str | None = None


def load_sources(sources: Sequence[Source], *, seed: int = 0) -> list[Example]:
    """The examples of all sources, in order: `limit` first, then `weight` (its fraction a sample drawn by
    `seed`).
    """
    examples: list[Example] = []
    for index, source in enumerate(sources):
        found = list(_take(load_source(source), source.limit))
        if not found:
            raise DataError(f"{source.label}: the source holds no examples")
        whole, fraction = divmod(source.weight, 1)
        chosen = random.Random(f"{seed}/{index}").sample(range(len(found)), round(fraction * len(found)))
        examples += found * int(whole) + [found[i] for i in sorted(chosen)]
    return examples


def load_source(source: Source) -> Iterator[Example]:
    """Examples of one source as they come, before `limit` and `weight`. Raises DataError naming the row at
    fault.
    """
    if source.demo is not None:
        yield from _demo(source)
        return
    if source.stdlib is not None:
        from train.stdlib_source import completions

        s = source.stdlib
        rows: Iterable[tuple[str, Any]] = (
            (f"stdlib {s.split} #{i}", row)
            for i, row in enumerate(completions(s.split, s.count, s.seed, s.prompt_chars))
        )
        default = "code"
    elif source.path is not None and Path(source.path).suffix in (".jsonl", ".json"):
        rows, default = _json_rows(Path(source.path)), Path(source.path).stem
    else:
        rows, default = _dataset_rows(source), Path(source.path or source.name or "").stem
    for origin, row in rows:
        yield parse_row(row, origin=origin, workload=source.workload, default_workload=default, field=source.field)


def parse_row(
    row: Any,
    *,
    origin: str,
    workload: str | None = None,
    default_workload: str = "default",
    field: str = "auto",
) -> Example:
    """One row of a file or dataset as an Example; keys with null values (columns filled up by Arrow) count
    as absent.

    `workload` overrides the row's own `workload` column, which overrides `default_workload`.
    """
    if not isinstance(row, Mapping):
        raise DataError(f"{origin}: expected a mapping with messages, conversations or prompt, got {_quote(row)}")
    row = _without_nulls(dict(row))
    label = workload or str(row.get("workload") or default_workload)
    kinds = {"messages": "messages", "conversations": "conversations", "completion": "prompt"}
    kind = field if field != "auto" else next((k for k, key in kinds.items() if key in row), None)
    if kind is None or kinds[kind] not in row:
        wanted = "messages, conversations or prompt" if kind is None else kinds[kind]
        raise DataError(f"{origin}: the row has no {wanted}; its keys are {', '.join(row) or 'none'}")
    if kind == "completion":
        prompt, completion = row["prompt"], row.get("completion", "")
        if not (isinstance(prompt, str) and isinstance(completion, str) and prompt):
            raise DataError(f"{origin}: expected prompt and completion as text, got {_quote([prompt, completion])}")
        return Example(label, origin, prompt=prompt, completion=completion)
    messages = _messages(row, kind, origin)
    if messages[0]["role"] != "system" and isinstance(row.get("system"), str) and row["system"]:
        messages = [{"role": "system", "content": row["system"]}, *messages]
    return Example(label, origin, messages=tuple(messages), tools=_tools(row.get("tools"), origin))


def _messages(row: Mapping[str, Any], kind: str, origin: str) -> list[Message]:
    turns = row[kind]
    if not isinstance(turns, list) or not turns:
        raise DataError(f"{origin}: expected {kind} to be a non-empty list of turns, got {_quote(turns)}")
    messages = []
    for number, turn in enumerate(turns, 1):
        where = f"{origin}: turn {number} of {len(turns)}"
        if not isinstance(turn, Mapping):
            raise DataError(f"{where}: expected a mapping, got {_quote(turn)}")
        speaker, text = ("from", "value") if kind == "conversations" and "from" in turn else ("role", "content")
        role = _ROLES.get(str(turn.get(speaker)))
        if role is None:
            raise DataError(
                f"{where}: unknown {speaker} {_quote(turn.get(speaker))}; expected one of {', '.join(_ROLES)}"
            )
        content = turn.get(text, "" if turn.get("tool_calls") else None)
        if not isinstance(content, str | list):
            raise DataError(f"{where} ({role}): expected text in '{text}', got {_quote(content)}")
        message = {
            **{k: v for k, v in turn.items() if k not in (speaker, text)},
            "role": role,
            "content": content,
        }
        if calls := message.get("tool_calls"):
            message["tool_calls"] = [_tool_call(call, where) for call in calls]
        messages.append(message)
    return messages


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    """A tool call with its arguments as a mapping: OpenAI sends them as JSON text, templates want the
    mapping.
    """
    function = call.get("function", call) if isinstance(call, Mapping) else {}
    if not isinstance(function.get("name"), str):
        raise DataError(f"{where}: expected a tool call with a function name, got {_quote(call)}")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError as error:
            raise DataError(f"{where}: the arguments of {function['name']} are not JSON: {error}") from None
    called = {**function, "arguments": arguments}
    return {**call, "function": called} if "function" in call else {"type": "function", "function": called}


def _tools(tools: Any, origin: str) -> tuple[dict[str, Any], ...]:
    if isinstance(tools, str):  # datasets whose columns cannot hold free-form schemas carry them as JSON text
        try:
            tools = json.loads(tools or "[]")
        except ValueError as error:
            raise DataError(f"{origin}: tools are not JSON: {error}") from None
    if not isinstance(tools or [], list) or not all(isinstance(tool, dict) for tool in tools or []):
        raise DataError(f"{origin}: expected tools to be a list of JSON schemas, got {_quote(tools)}")
    return tuple(tools or ())


def _demo(source: Source) -> Iterator[Example]:
    from train.demo import WORKLOADS, conversations

    demo = source.demo
    assert demo is not None
    made = conversations(demo.split, demo.count, demo.seed, demo.workloads or WORKLOADS)
    for number, conversation in enumerate(made):
        row = {"messages": conversation.messages, "workload": conversation.workload}
        yield parse_row(row, origin=f"demo {demo.split} #{number}", workload=source.workload)


def _json_rows(path: Path) -> Iterator[tuple[str, Any]]:
    if not path.is_file():
        raise DataError(f"{path}: no such file; a relative path starts at the working directory, {Path.cwd().name}/")
    try:
        if path.suffix == ".json":
            rows = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(rows, list):
                raise DataError(f"{path}: expected a list of rows, got {_quote(rows)}; use .jsonl for a row per line")
            yield from ((f"{path}[{i}]", row) for i, row in enumerate(rows))
            return
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield f"{path}:{number}", json.loads(line)
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text: {error}") from None
    except json.JSONDecodeError as error:
        line_number = error.lineno if path.suffix == ".json" else number
        raise DataError(f"{path}:{line_number}: not JSON (column {error.colno}): {error.msg}") from None


def _dataset_rows(source: Source) -> Iterator[tuple[str, Any]]:
    """Parquet files, local dataset directories and hub datasets, through the `datasets` library."""
    try:
        import datasets
    except ImportError:
        raise DataError(f"{source.label}: reading it needs the `datasets` package: pip install datasets") from None
    split = source.split or "train"
    if source.path is not None and not Path(source.path).exists():
        raise DataError(
            f"{source.path}: no such file or directory; for a dataset on the hub write name: instead of path:"
        )
    try:
        if source.path is not None and any(
            (Path(source.path) / f).exists() for f in ("state.json", "dataset_dict.json")
        ):
            table = datasets.load_from_disk(source.path)
            table = table[split] if isinstance(table, datasets.DatasetDict) else table
        elif source.path is not None and Path(source.path).is_file():
            if Path(source.path).suffix != ".parquet":
                raise DataError(f"{source.path}: expected a .jsonl, .json or .parquet file, or a dataset directory")
            table = datasets.load_dataset("parquet", data_files=source.path, split=split)
        else:
            table = datasets.load_dataset(source.path or source.name, source.config, split=split,
                                          revision=source.revision)  # fmt: skip
    except DataError:
        raise
    except Exception as error:  # the library raises whatever its many back ends raise
        raise DataError(f"{source.label}: split {split!r} cannot be loaded: {error}") from error
    yield from ((f"{source.label} {split} #{i}", row) for i, row in enumerate(table))


def _take(examples: Iterator[Example], limit: int | None) -> Iterator[Example]:
    for count, example in enumerate(examples):
        if count == limit:
            return
        yield example


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list | tuple) else value


def _quote(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."
