"""Prompts in every shape users give them -> token ids. Knows a tokenizer and nothing of engines or
limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError

from speculators.errors import ConfigError


@dataclass
class Prompt:
    text: str | None  # None: given as token ids
    token_ids: list[int]


def read_prompts(prompts: Any, tokenizer: Any) -> list[Prompt]:
    """A string, {"prompt": str} or {"prompt_token_ids": [int]}, or a list of them."""
    if isinstance(prompts, (str, dict)):
        prompts = [prompts]
    if not isinstance(prompts, (list, tuple)):
        raise ConfigError(
            f"prompts: a {type(prompts).__name__}; expected a string, a dict, or a list of them"
        )
    if prompts and all(isinstance(each, int) for each in prompts):
        raise ConfigError(
            'prompts: a list of numbers; write {"prompt_token_ids": [...]} for a prompt of'
            " token ids"
        )
    read, faults = [], []
    for i, prompt in enumerate(prompts):
        try:
            read.append(_read_prompt(prompt, tokenizer))
        except ConfigError as error:
            faults.append(f"prompt {i}: {error}")
    if faults:
        raise ConfigError("; ".join(faults))
    return read


def _read_prompt(prompt: Any, tokenizer: Any) -> Prompt:
    if isinstance(prompt, str):
        prompt = {"prompt": prompt}
    if isinstance(prompt, dict) and "multi_modal_data" in prompt:
        raise ConfigError(
            "multi_modal_data: images, audio and video are not read here; only text is"
        )
    if (
        not isinstance(prompt, dict)
        or not set(prompt) <= {"prompt", "prompt_token_ids"}
        or not prompt
    ):
        found = sorted(prompt) if isinstance(prompt, dict) else type(prompt).__name__
        raise ConfigError(
            f'{found}; expected a string, {{"prompt": str}} or {{"prompt_token_ids": [int]}}'
        )
    token_ids, text = prompt.get("prompt_token_ids"), prompt.get("prompt")
    if token_ids is not None:
        return Prompt(text, [int(token) for token in token_ids])
    if not isinstance(text, str):
        raise ConfigError(f"its text is a {type(text).__name__}; expected a string")
    return Prompt(text, list(_needed(tokenizer)(text).input_ids))


def chat_prompts(messages: Sequence[Any], tokenizer: Any, options: dict[str, Any]) -> list[Prompt]:
    """Conversations through the tokenizer's chat template, which writes every special token
    itself."""
    tokenizer = _needed(tokenizer)
    if not messages:
        raise ConfigError("chat: no messages; expected a list of {'role': ..., 'content': ...}")
    conversations = [messages] if isinstance(messages[0], dict) else messages
    prompts = []
    for conversation in conversations:
        _refuse_media(conversation)
        try:
            text = tokenizer.apply_chat_template(list(conversation), tokenize=False, **options)
        except TemplateError as error:
            raise ConfigError(f"chat: the chat template cannot be used: {error}") from error
        prompts.append(Prompt(text, list(tokenizer(text, add_special_tokens=False).input_ids)))
    return prompts


def _refuse_media(conversation: Sequence[Any]) -> None:
    """ConfigError for parts that are no text: a template would write a placeholder for an image
    that nobody reads."""
    for i, message in enumerate(conversation):
        parts = message.get("content") if isinstance(message, dict) else None
        for part in parts if isinstance(parts, list) else ():
            if isinstance(part, dict) and part.get("type", "text") != "text":
                raise ConfigError(
                    f"chat: message {i} has a part of type {part['type']}; only text is read here"
                )


def _needed(tokenizer: Any) -> Any:
    if tokenizer is None:
        raise ConfigError(
            'text needs a tokenizer; pass LLM(tokenizer=...), or {"prompt_token_ids": [...]}'
        )
    return tokenizer
