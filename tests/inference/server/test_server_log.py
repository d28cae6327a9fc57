"""A server with a log writes what it answered, as tokens, and the answers are as without one."""

from __future__ import annotations

import httpx2
import pytest

from draftsmith.inference.traffic_log.log_options import LogOptions
from draftsmith.inference.traffic_log.reader import read_log
from draftsmith.inference.traffic_log.recorder import Recorder

CLIENT = httpx2.Client(timeout=60)
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{{ extra }}"
CHAT = {
    "messages": [{"role": "user", "content": "hi"}],
    "chat_template_kwargs": {"extra": "!"},
    "max_completion_tokens": 5,
    "user": "jane",
    "temperature": 0,
}
COMPLETION = {"prompt": ["one", [5, 6]], "n": 2, "temperature": 0.5, "seed": 3, "max_tokens": 4}


@pytest.fixture
def logged(serving, drafting_llm, model, tmp_path):
    """logged(path, body): the answer, and what the log has once the server has shut down. Before,
    a client may have the end of a stream that is not recorded yet."""
    recorder = Recorder(tmp_path / "log", LogOptions())
    url = serving(drafting_llm("fake", model), recorder=recorder, chat_template=TEMPLATE)

    def ask(path: str, body: dict):
        answer = CLIENT.post(f"{url}/v1/{path}", json=body)
        health = CLIENT.get(f"{url}/health").json()
        serving.stop(url)
        recorded = recorder.health()
        assert health["log"]["failed"] == recorded["failed"] == recorded["left_out"] == 0
        return answer, list(read_log(tmp_path / "log")) if answer.status_code == 200 else []

    return ask


def test_chat_is_logged_as_tokens_with_its_counters(logged, byte_tokenizer):
    answer, (one,) = logged("chat/completions", CHAT)
    (choice,) = answer.json()["choices"]
    assert "token_ids" not in choice
    assert (one.messages, one.prompt) == (CHAT["messages"], None)
    assert one.chat_template_kwargs == {"extra": "!"}
    assert one.prompt_token_ids == byte_tokenizer("hi!").input_ids
    assert one.text == choice["message"]["content"] == byte_tokenizer.decode(one.token_ids)
    assert (one.model, one.finish_reason) == ("tiny", "length")
    assert one.sampling == {"temperature": 0, "max_tokens": 5}
    assert one.spec_decode.num_drafts > 0


def test_each_choice_of_a_stream_is_logged(logged):
    """Prompts that are tokens have no text; a request that was refused has no line."""
    answer, exchanges = logged("completions", COMPLETION | {"stream": True})
    assert answer.status_code == 200 and len(exchanges) == 4
    assert [one.prompt for one in exchanges] == ["one", "one", None, None]
    assert [one.prompt_token_ids for one in exchanges[2:]] == [[5, 6], [5, 6]]
    assert all(len(one.token_ids) == 4 and one.text is not None for one in exchanges)
    assert len({one.time for one in exchanges}) == 1


@pytest.mark.parametrize("fields", [{"n": 0}, {"prompt": [5, 9999]}])
def test_what_is_refused_is_not_logged(logged, tmp_path, fields):
    """Nor counted as left out of the log: it may be refused before it has a place, or behind it."""
    answer, _ = logged("completions", COMPLETION | fields)
    assert answer.status_code == 400 and not list((tmp_path / "log").iterdir())
