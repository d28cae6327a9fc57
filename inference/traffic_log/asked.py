"""What a log keeps of the body of a request: sampling parameters, and what the chat template was
named. Nothing else of it, such as the name of a user, is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from draftsmith.inference.sampling_params import SamplingParams

SAMPLING = tuple(field.name for field in fields(SamplingParams))
# of vLLM's chats, beside `messages`: arguments of transformers' apply_chat_template
TEMPLATE = ("tools", "documents", "add_generation_prompt", "continue_final_message")


def asked_sampling(body: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling parameters that a body names; null stands for the default."""
    sampling = {name: body[name] for name in SAMPLING if body.get(name) is not None}
    if body.get("max_completion_tokens") is not None:  # OpenAI's name of today
        sampling["max_tokens"] = body["max_completion_tokens"]
    return sampling


def asked_template(body: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of the chat template that a body names."""
    named = {name: body[name] for name in TEMPLATE if body.get(name) is not None}
    if body.get("tool_choice") == "none":  # then no tools are shown to the model
        named.pop("tools", None)
    return named | (body.get("chat_template_kwargs") or {})
