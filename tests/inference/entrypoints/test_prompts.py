"""Conversations as chat templates read them, offline and on a server alike."""

from __future__ import annotations

import httpx2
import pytest

from draftsmith.inference import SamplingParams
from draftsmith.inference.entrypoints.prompts import chat_prompts
from draftsmith.speculators.errors import ConfigError
from tests.support.errors import raises_at

CALL = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}}
HISTORY = [
    {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "rain"},
]
# as SmolLM2's: fails on whatever is not a string
TEMPLATE = (
    "{% for m in messages %}{{ '<' + m.role + ':' + m.content + '>' }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.arguments.city }}]{% endfor %}{% endfor %}"
)
WRITTEN = "<user:a\nb><assistant:>[Bern]<tool:rain>"


@pytest.fixture(scope="module")
def model(tiny_model, byte_tokenizer):
    return tiny_model("qwen3", vocab_size=len(byte_tokenizer), max_position_embeddings=256)


def test_contents_and_calls_are_the_same_text_offline_and_online(drafting_llm, model, serving):
    llm = drafting_llm("off", model)
    params = SamplingParams(temperature=0, max_tokens=1)
    (output,) = llm.chat(HISTORY, params, False, chat_template=TEMPLATE)
    assert output.prompt == WRITTEN
    asked = {"messages": HISTORY, "max_tokens": 1, "return_token_ids": True}
    url = serving(llm, chat_template=TEMPLATE)
    answer = httpx2.post(f"{url}/v1/chat/completions", json=asked, timeout=60).json()
    assert answer["prompt_token_ids"] == output.prompt_token_ids
    assert "tool_calls" in HISTORY[1] and CALL["function"]["arguments"] == '{"city": "Bern"}'


@pytest.mark.parametrize(
    "knows, roles, written",
    [
        (False, ["developer", "user"], "<system:0><user:1>"),
        (False, ["system", "user", "developer"], "<system:0\n\n2><user:1>"),
        (True, ["system", "user", "developer"], "<system:0><user:1><developer:2>"),
    ],
)
def test_developers_are_the_system_for_templates_without_them(
    knows, roles, written, byte_tokenizer
):
    """As in vLLM."""
    template = "{% set own = 'developer' %}" * knows + TEMPLATE
    messages = [{"role": role, "content": str(i)} for i, role in enumerate(roles)]
    (prompt,) = chat_prompts(messages, byte_tokenizer, {"chat_template": template})
    assert prompt.text == written


def nested(depth: int) -> list:
    value: list = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize("messages", [5, [], [5], {"role": "user", "content": "a"}, "abc"])
def test_what_is_no_conversation_is_an_error_of_the_user(messages, byte_tokenizer):
    with raises_at(ConfigError, "chat"):
        chat_prompts(messages, byte_tokenizer, {})


@pytest.mark.parametrize(
    "message",
    [
        "hi",
        {"role": "user", "content": 5},
        {"role": "user", "content": [{"type": "image_url"}]},
        {"role": "user", "content": [{"type": "text"}]},
        {"role": "user", "content": "a", "tool_calls": [{"function": {"arguments": "{"}}]},
        {"role": "user", "content": "a", "fault": True},
        {"role": "user", "content": "a", "tool_calls": 5},
        {"role": "user", "content": "a", "nested": nested(2000)},
        {"role": "user", "content": "a\ud800"},
    ],
)
def test_what_a_template_cannot_read_is_an_error_of_the_user(message, byte_tokenizer):
    fault = "{{ messages[0].fault + 'x' if messages[0].fault else '' }}"  # a TypeError
    template = f"{fault}{{{{ messages[0].content }}}}"
    with raises_at(ConfigError, "chat"):
        chat_prompts([[message]], byte_tokenizer, {"chat_template": template})
