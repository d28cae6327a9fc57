"""What is recorded is redacted first, and what fails is told and stops nothing."""

from __future__ import annotations

import threading
import time

import pytest

from draftsmith.inference.traffic_log import recorder as recorder_module
from draftsmith.inference.traffic_log.log_options import LogOptions
from draftsmith.inference.traffic_log.reader import read_log
from draftsmith.inference.traffic_log.recorder import Recorder
from draftsmith.inference.traffic_log.records import LoggedExchange
from draftsmith.inference.traffic_log.redaction import REDACTED, read_redaction
from draftsmith.speculators.errors import ConfigError

SECRET = "4111 1111"


def exchange(**fields) -> LoggedExchange:
    texts = {"prompt": "a", "prompt_token_ids": [1], "text": "b", "token_ids": [2]}
    return LoggedExchange(**{"time": 5.0, "model": "tiny", **texts, **fields})


def record(recorder: Recorder, *exchanges: LoggedExchange) -> None:
    draw = recorder.draw()
    assert draw is not None
    recorder.record(draw, lambda: exchanges, 10)


def expressions(tmp_path, text: str = "# cards\n\\d{4} \\d{4}\n"):
    path = tmp_path / "patterns.txt"
    path.write_text(text)
    return path


def test_expressions_replace_what_they_find_in_every_text(tmp_path):
    redact = read_redaction(expressions(tmp_path))
    assert redact(exchange()) == exchange()
    messages = [{"role": "user", "content": [{"type": "text", "text": f"my {SECRET}."}]}]
    chat = exchange(
        prompt=None,
        messages=messages,
        chat_template_kwargs={"tools": [{SECRET: 1}]},
        text=SECRET,
        sampling={"stop": [SECRET]},
    )
    redacted = redact(chat)
    assert redacted.messages[0]["content"][0]["text"] == f"my {REDACTED}."
    assert redacted.text == REDACTED and redacted.sampling == {"stop": [REDACTED]}
    assert redacted.chat_template_kwargs == {"tools": [{REDACTED: 1}]}
    assert redacted.prompt_token_ids is None and redacted.token_ids is None
    of_prompt = redact(exchange(prompt=SECRET))
    assert (of_prompt.prompt_token_ids, of_prompt.token_ids) == (None, [2])


@pytest.mark.parametrize("unseen", [{"prompt": None}, {"text": None}])
def test_expressions_leave_out_tokens_without_their_text(tmp_path, unseen):
    assert read_redaction(expressions(tmp_path))(exchange(**unseen)) is None


@pytest.mark.parametrize(
    "name, text, line", [("p.txt", "ok\n(\n", ":2"), ("p.txt", "# none\n", ""), ("p.py", "x=1", "")]
)
def test_redaction_that_cannot_be_names_file_and_line(tmp_path, name, text, line):
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError) as error:
        read_redaction(tmp_path / name)
    assert error.value.where == f"--log-redact {tmp_path / name}{line}"


def test_function_changes_and_leaves_out_exchanges_but_not_their_sample(tmp_path):
    (tmp_path / "hook.py").write_text(
        "from dataclasses import replace\n"
        "def redact(exchange):\n"
        "    if exchange.text == 'leave out':\n"
        "        return None\n"
        "    return replace(exchange, text='changed', time=1.0, key=0.0)\n"
    )
    recorder = Recorder(tmp_path / "log", LogOptions(log_redact=tmp_path / "hook.py"))
    record(recorder, exchange(), exchange(text="leave out"))
    recorder.close()
    (one,) = read_log(tmp_path / "log")
    assert one.text == "changed" and one.key > 0 and one.time > 1
    assert recorder.health() == {
        "ok": True,
        "error": None,
        "written": 1,
        "left_out": 1,
        "dropped": 0,
        "failed": 0,
    }


def test_failure_is_told_without_its_words_and_the_next_is_written(tmp_path):
    (tmp_path / "hook.py").write_text(
        "def redact(exchange):\n"
        "    if exchange.text == 'bad':\n"
        "        raise ValueError(exchange.prompt)\n"
        "    return exchange\n"
    )
    recorder = Recorder(tmp_path / "log", LogOptions(log_redact=tmp_path / "hook.py"))
    record(recorder, exchange(text="bad", prompt=SECRET))
    told = threading.Event()
    recorder.record(recorder.draw(), lambda: told.wait(10) and [], 0)
    while not recorder.health()["failed"]:
        time.sleep(0.001)
    health = recorder.health()
    told.set()
    assert (health["ok"], health["error"], health["written"]) == (False, "ValueError", 0)
    record(recorder, exchange())
    recorder.close()
    assert recorder.health()["ok"] and len(list(read_log(tmp_path / "log"))) == 1


def test_exchanges_beyond_what_may_wait_are_dropped(tmp_path, monkeypatch):
    monkeypatch.setattr(recorder_module, "MOST_WAITING_BYTES", 25)
    recorder = Recorder(tmp_path, LogOptions())
    blocked = threading.Event()
    recorder.record(recorder.draw(), lambda: blocked.wait(10) and [], 10)
    for _ in range(3):
        record(recorder, exchange())
    blocked.set()
    while not recorder.health()["written"]:
        time.sleep(0.001)
    record(recorder, exchange())  # there is room again
    recorder.close()
    health = recorder.health()
    assert (health["written"], health["dropped"]) == (2, 2)
