"""Exchanges are what the bytes say, whatever the bytes are."""

from __future__ import annotations

import asyncio
import json

import pytest

from draftsmith.inference.log_proxy.exchanges import read_exchanges
from draftsmith.inference.log_proxy.upstream_counters import UpstreamCounters
from draftsmith.inference.metrics import SpecDecodeCounters

CHAT = {"messages": [{"role": "user", "content": "hi"}], "tools": [{"type": "function"}]}
SAID = {
    "num_spec_steps": 5,
    "num_draft_tokens": 15,
    "num_accepted_draft_tokens": 6,
    "acceptance_histogram": [1, 2, 2, 0],
}


def exchanges(request, answer, events=False):
    return read_exchanges(5.0, json.dumps(request).encode(), answer, events)


def chat_answer(**message) -> bytes:
    choice = {"index": 0, "message": {"content": "yes", **message}, "finish_reason": "stop"}
    return json.dumps({"model": "m", "choices": [choice]}).encode()


def test_choices_of_several_prompts_are_exchanges_of_their_own():
    request = {"prompt": ["a", "b"], "n": 2, "max_tokens": 3, "logprobs": None}
    choices = [{"index": i, "text": f"t{i}", "finish_reason": "length"} for i in (3, 0, 2, 1)]
    answer = json.dumps({"model": "m", "choices": choices}).encode()
    read = exchanges(request, answer)
    assert [(one.prompt, one.text) for one in read] == [
        ("a", "t0"),
        ("a", "t1"),
        ("b", "t2"),
        ("b", "t3"),
    ]
    assert read[0].sampling == {"n": 2, "max_tokens": 3}
    (one,) = exchanges(
        request | {"prompt": [4, 5], "n": 1}, json.dumps({"choices": choices[1:2]}).encode()
    )
    assert (one.prompt, one.prompt_token_ids) == (None, [4, 5])


def test_chat_has_what_its_template_was_given_and_its_counters():
    metrics = {"metrics": {"speculative_decoding": SAID}}
    answer = json.dumps(json.loads(chat_answer()) | metrics).encode()
    kwargs = {"chat_template_kwargs": {"enable_thinking": False}}
    (one,) = exchanges(CHAT | kwargs | {"max_completion_tokens": 9}, answer)
    assert one.chat_template_kwargs == {"tools": CHAT["tools"], "enable_thinking": False}
    assert one.sampling == {"max_tokens": 9} and one.text == "yes"
    assert one.spec_decode == SpecDecodeCounters(5, 15, 6, [4, 2, 0])
    (one,) = exchanges(CHAT | {"tool_choice": "none"}, answer)
    assert one.chat_template_kwargs == {}


@pytest.mark.parametrize("message", [{"tool_calls": [{}]}, {"reasoning_content": "hm"}])
def test_text_that_was_taken_apart_is_none(message):
    (one,) = exchanges(CHAT, chat_answer(**message))
    assert one.text is None and one.finish_reason == "stop"


def test_stream_that_ends_within_an_event_has_what_came():
    events = b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\r\n\r\n: ping\n\n'
    (one,) = exchanges(CHAT, events + b'data: {"choices":[{"index":0,"del', events=True)
    assert (one.text, one.finish_reason) == ("a", None)


@pytest.mark.parametrize(
    "request_, answer",
    [
        (b"{", chat_answer()),
        (b"[]", chat_answer()),
        (b'{"messages": 5}', chat_answer()),
        (b'{"messages": [{"content": "\\ud800"}]}', chat_answer()),
        (b"[" * 100_000, chat_answer()),
        (b"{}", chat_answer()),
        (b'{"prompt": []}', chat_answer()),
        (b'{"prompt": "a", "echo": true}', chat_answer()),
        (b'{"prompt": "a", "chat_template_kwargs": 3}', b'{"choices": [{"index": "0"}]}'),
        (b'{"messages": [], "chat_template_kwargs": 3}', chat_answer()),
        (b'{"prompt": "a"}', b'{"choices": 3}'),
        (b'{"prompt": "a"}', b'{"choices": [{"index": 7}]}'),
        (b'{"prompt": "a"}', b'{"choices": [{"index": 0, "token_ids": [-1]}]}'),
        (b'{"prompt": "a"}', b"<p>a page</p>"),
        (b'{"prompt": "a"}', b""),
    ],
)
def test_what_has_another_shape_is_left_out(request_, answer):
    assert read_exchanges(5.0, request_, answer, False) == []


def test_counters_of_the_server_behind_are_what_they_grew_by():
    """A server that was started again counts from 0."""
    metrics = iter([10, 14, 14, 3, 5])

    class Behind:
        async def get(self, path: bytes, timeout_s: float):
            count = next(metrics)
            lines = [f"vllm:spec_decode_num_drafts_total {count}"]
            lines += [f"vllm:spec_decode_num_draft_tokens_total {3 * count}"]
            lines += [f"vllm:spec_decode_num_accepted_tokens_total {2 * count}"]
            return 200, "\n".join([*lines, ""]).encode()

    recorded = []

    class Log:
        record_counters = staticmethod(recorded.append)

    async def read() -> None:
        counters = UpstreamCounters(Behind(), Log())
        for _ in range(5):
            await counters.read()

    asyncio.run(read())
    assert [one.spec_decode for one in recorded] == [
        SpecDecodeCounters(4, 12, 8),
        SpecDecodeCounters(2, 6, 4),
    ]
