"""Prompts in every shape users give them -> token ids."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from draftsmith.speculators.errors import ConfigError


@dataclass
class Prompt:
    """A prompt as the engine reads it."""

    text: str | None  # None: given as token ids
    token_ids: list[int]


def read_prompts(prompts: Any, tokenizer: Any) -> list[Prompt]:
    """A string, {"prompt": str}, {"prompt_token_ids": [int]} or a list of token ids; or a list of
    such prompts."""
    if isinstance(prompts, (str, dict)):
        prompts = [prompts]
    if not isinstance(prompts, (list, tuple)):
        raise ConfigError(
            f"a {type(prompts).__name__}; expected a string, a dict, or a list of them",
            where="prompts",
        )
    if prompts and all(isinstance(token, int) for token in prompts):
        prompts = [prompts]
    read = []
    faults = []
    for i, prompt in enumerate(prompts):
        try:
            read.append(_read_prompt(prompt, tokenizer))
        except ConfigError as error:
            faults.append(f"prompt {i}: {error}")
    if faults:
        raise ConfigError("; ".join(faults), where="prompts")
    return read


def _read_prompt(prompt: Any, tokenizer: Any) -> Prompt:
    if isinstance(prompt, str):
        prompt = {"prompt": prompt}
    if isinstance(prompt, (list, tuple)):
        prompt = {"prompt_token_ids": prompt}
    if isinstance(prompt, dict) and "multi_modal_data" in prompt:
        raise ConfigError(
            "images, audio and video are not read here; only text is", where="multi_modal_data"
        )
    if not isinstance(prompt, dict) or set(prompt) - {"prompt", "prompt_token_ids"} or not prompt:
        kind = [*prompt] if isinstance(prompt, dict) else type(prompt).__name__
        raise ConfigError(
            f'{kind}; expected a string, {{"prompt": str}}, token ids or'
            ' {"prompt_token_ids": [int]}'
        )
    token_ids = prompt.get("prompt_token_ids")
    text = prompt.get("prompt")
    if text is None and token_ids is not None:
        return Prompt(None, _whole_numbers(token_ids))
    if not isinstance(text, str):
        raise ConfigError(f"its text is a {type(text).__name__}; expected a string")
    if token_ids is not None:
        return Prompt(text, _whole_numbers(token_ids))
    return Prompt(text, _encoded(_required(tokenizer), text))


def _whole_numbers(token_ids: Any) -> list[int]:
    if isinstance(token_ids, (str, bytes)) or not isinstance(token_ids, Iterable):
        raise ConfigError(
            f"its token ids are of type {type(token_ids).__name__}; expected a list of whole"
            " numbers"
        )
    tokens = list(token_ids)
    wrong = [t for t in tokens if not isinstance(t, Integral) or isinstance(t, bool)]
    if wrong:
        raise ConfigError(f"token ids {wrong[:3]}; expected whole numbers")
    return [int(token) for token in tokens]


def _encoded(tokenizer: Any, text: str, **options: Any) -> list[int]:
    """The text's token ids. ConfigError for half a surrogate pair, which is no character and has no
    bytes."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        code = f"U+{ord(text[error.start]):04X}"
        raise ConfigError(
            f"character {error.start} of its text is {code}, half of a surrogate pair; expected"
            " text that UTF-8 can hold: decode it anew from its source"
        ) from None
    return list(tokenizer(text, **options).input_ids)


def chat_prompts(
    messages: Any,
    tokenizer: Any,
    options: dict[str, Any],
    check_text: Callable[[str], object] = lambda text: None,
) -> list[Prompt]:
    """Conversations through the tokenizer's chat template, which writes every special token itself.

    `messages`: one conversation, a list of {"role": ..., "content": ...}, or a list of them.
    `check_text`: raises an error for a text that is not to be tokenized."""
    tokenizer = _required(tokenizer)
    if not isinstance(messages, (list, tuple)) or not messages:
        kind = "no messages" if messages in ([], ()) else f"of type {type(messages).__name__}"
        raise ConfigError(
            f"{kind}; expected a list of {{'role': ..., 'content': ...}}", where="chat"
        )
    conversations = [messages] if isinstance(messages[0], dict) else messages
    prompts = []
    for i, conversation in enumerate(conversations):
        if not isinstance(conversation, (list, tuple)):
            raise ConfigError(
                f"conversation {i} is of type {type(conversation).__name__}; expected a list of"
                " {'role': ..., 'content': ...}",
                where="chat",
            )
        turns = [template_message(i, message) for i, message in enumerate(conversation)]
        try:
            if any(turn["role"] == "developer" for turn in turns):
                template = tokenizer.get_chat_template(
                    options.get("chat_template"), options.get("tools")
                )
                turns = _as_system(turns, template)
            text = tokenizer.apply_chat_template(turns, tokenize=False, **options)
        except Exception as error:  # templates are programs, which may raise anything
            raise ConfigError(f"the chat template cannot be used: {error}", where="chat") from error
        check_text(text)
        try:
            prompts.append(Prompt(text, _encoded(tokenizer, text, add_special_tokens=False)))
        except ConfigError as error:
            raise ConfigError(f"conversation {i}: {error}", where="chat") from None
    return prompts


def _as_system(turns: list[dict[str, Any]], template: str) -> list[dict[str, Any]]:
    """OpenAI's `developer` messages as `system` ones where the template does not know the role, and
    one system message at the beginning for several or one further on, as in vLLM."""
    if "'developer'" in template or '"developer"' in template:
        return turns
    turns = [{**turn, "role": "system"} if turn["role"] == "developer" else turn for turn in turns]
    system = [turn for turn in turns if turn["role"] == "system"]
    if system == turns[:1]:
        return turns
    text = "\n\n".join(turn["content"] for turn in system if turn["content"])
    others = [turn for turn in turns if turn["role"] != "system"]
    return [{"role": "system", "content": text}, *others]


def template_message(index: int, message: Any) -> dict[str, Any]:
    """A message of a conversation as chat templates read it, as in vLLM: its content is one string
    (no content is "", text parts are joined by line breaks), and the arguments of tool calls are
    objects. ConfigError for anything that is not text."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ConfigError(
            f"message {index}: expected {{'role': ..., 'content': ...}}", where="chat"
        )
    try:
        read = copy.deepcopy(message)
    except RecursionError:
        raise ConfigError(f"message {index} is nested too deeply", where="chat") from None
    parts = message.get("content")
    parts = "" if parts is None else parts
    if not isinstance(parts, (str, list, tuple)):
        raise ConfigError(
            f"the content of message {index} is a {type(parts).__name__};"
            " expected a string or text parts",
            where="chat",
        )
    if not isinstance(parts, str):
        parts = "\n".join(_part_text(index, part) for part in parts)
    read["content"] = parts
    calls = read.get("tool_calls") or ()
    if not isinstance(calls, (list, tuple)):
        raise ConfigError(
            f"the tool_calls of message {index} are a {type(calls).__name__}; expected a list",
            where="chat",
        )
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        # clients send the arguments as JSON text
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            try:
                function["arguments"] = json.loads(function["arguments"] or "{}")
            except ValueError:
                raise ConfigError(
                    f"message {index}: tool_calls with arguments that are not JSON", where="chat"
                ) from None
    return read


def _part_text(index: int, part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type", "text") if isinstance(part, dict) else type(part).__name__
    text = part.get("text") if kind == "text" else None
    if not isinstance(text, str):
        raise ConfigError(
            f"message {index} has a part of type {kind}; only text is read", where="chat"
        )
    return text


def _required(tokenizer: Any) -> Any:
    if tokenizer is None:
        raise ConfigError(
            'text needs a tokenizer; pass LLM(tokenizer=...), or {"prompt_token_ids": [...]}',
            where="tokenizer",
        )
    return tokenizer
