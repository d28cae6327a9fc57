"""From a log to texts: what the target's template and tokenizer would give is taken token by token,
anything else is left out by its reason, and time alone parts them."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest
from transformers import AutoTokenizer

from draftsmith.inference.traffic_log.records import LoggedExchange
from draftsmith.speculators.errors import DataError
from draftsmith.train.data import traffic
from draftsmith.train.data.traffic import LoggedText, Sampling, TrafficReader, TrafficSlice
from tests.support.errors import raises_at
from tests.support.targets import TOKENIZER
from tests.support.traffic import write_log
from tests.support.training import recipe_of

MESSAGES = [{"role": "user", "content": "How many apples are there?"}]
ANSWER = "There are 4 apples."
TARGET = AutoTokenizer.from_pretrained(TOKENIZER)
PROMPT = TARGET.apply_chat_template(MESSAGES, add_generation_prompt=True)["input_ids"]
END = TARGET.eos_token_id
TOKENS = [*TARGET.encode(ANSWER, add_special_tokens=False), END]


def reader(**defaults) -> TrafficReader:
    data = {"train": [{"path": "chats.jsonl"}], "max_length": 64}
    recipe = recipe_of("eagle3", target={"model": str(TOKENIZER)}, data=data)
    return TrafficReader(recipe, TARGET, ["target"], defaults)


def exchange(**changes) -> LoggedExchange:
    texts = {"messages": MESSAGES, "prompt_token_ids": PROMPT, "token_ids": TOKENS, "text": ANSWER}
    return LoggedExchange(
        **{"time": 1.0, "model": "target", "finish_reason": "stop"} | texts | changes
    )


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"token_ids": None},
        {"prompt_token_ids": None},
        {"prompt_token_ids": None, "token_ids": None},
        {"text": "There are 4 app"},  # a stop string cut it
        {"text": None},
        {"sampling": {"max_tokens": 5, "seed": 3, "presence_penalty": 0.0, "stop": None}},
        {"messages": None},  # it was sent as tokens
    ],
)
def test_text_is_taken_as_the_target_wrote_it(changes):
    part = reader().slice_of([exchange(**changes)])
    assert [text.tokens for text in part.texts] == [(PROMPT, TOKENS)] and not part.left_out


def test_text_without_tokens_that_was_cut_has_no_end():
    cut = exchange(token_ids=None, finish_reason="length")
    assert [list(text.output_ids) for text in reader().slice_of([cut]).texts] == [TOKENS[:-1]]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model": "another"}, traffic.OTHER_MODEL),
        ({"prompt_token_ids": [7, *PROMPT]}, traffic.OTHER_PROMPT),
        ({"messages": [*MESSAGES, {"role": "assistant", "content": "Th"}]}, traffic.OTHER_PROMPT),
        ({"messages": None, "prompt_token_ids": [4096, 4097]}, traffic.OTHER_PROMPT),
        ({"token_ids": TOKENS[::-1]}, traffic.OTHER_RESPONSE),
        ({"token_ids": TOKENS[:1]}, traffic.OTHER_RESPONSE),  # not the whole of its text
        ({"token_ids": TOKENS[:1], "text": None}, traffic.NO_RESPONSE),
        ({"token_ids": None, "text": None}, traffic.NO_RESPONSE),
        ({"sampling": {"presence_penalty": 0.5}}, traffic.OTHER_SAMPLING),
        ({"sampling": {"response_format": {"type": "json_object"}}}, traffic.OTHER_SAMPLING),
    ],
)
def test_exchange_that_cannot_be_used_is_left_out_by_its_reason(changes, reason):
    part = reader().slice_of([exchange(**changes), exchange()])
    assert part.left_out == {reason: 1} and (part.read, len(part.texts)) == (2, 1)


def test_prompt_of_the_old_suite_and_one_without_room_are_left_out():
    assert reader().slice_of([exchange()], [PROMPT]).left_out == {traffic.OF_EVALUATION: 1}
    long = [{"role": "user", "content": "apples " * 80}]
    part = reader().slice_of([exchange(messages=long, prompt_token_ids=None)])
    assert part.left_out == {traffic.NO_ROOM: 1}


def test_sampling_that_a_request_does_not_name_is_the_servers():
    part = reader(temperature=0.6, top_k=20).slice_of([exchange(sampling={"temperature": 0.0})])
    assert part.texts[0].sampling == Sampling(0.0, 1.0, 20)
    part = reader(repetition_penalty=1.1).slice_of([exchange()])
    assert part.left_out == {traffic.OTHER_SAMPLING: 1}


def texts(times) -> list[LoggedText]:
    return [LoggedText(time, f"{time}", [1], [2, 3], Sampling(1.0, 1.0, 0)) for time in times]


@pytest.mark.parametrize("times", [range(100), [min(time, 85) for time in range(100)]])
def test_slice_is_split_by_time_alone(times):
    part = TrafficSlice(texts(map(float, times)), 100, {}, {})
    parts = [part.train, part.choice, part.judge]
    assert [*parts[0], *parts[1], *parts[2]] == part.texts
    assert [len(texts) for texts in parts] == [70, 10, 20]
    for earlier, later in pairwise(parts):
        assert earlier[-1].time < later[0].time
    assert TrafficSlice.loaded(part.dumped()) == part


def test_texts_of_one_moment_are_in_one_part():
    part = TrafficSlice(texts([0.0] * 75 + [1.0] * 25), 100, {}, {})
    assert [len(part.train), len(part.choice), len(part.judge)] == [0, 75, 25]


def test_newest_time_is_of_the_target_and_of_no_clock_that_is_ahead(tmp_path):
    ahead = exchange(time=time.time() + 10 * traffic.DAY)
    ours = [exchange(time=5.0), exchange(time=7.0)]
    others = [exchange(time=9.0, model="another")]
    log = write_log(tmp_path, [*ours, *others, ahead])
    assert traffic.newest_time(log, {"target"}) == 7.0
    assert traffic.newest_time(log, {"nobody"}) == 9.0
    with raises_at(DataError, f"--log {log}"):
        traffic.newest_time(write_log(tmp_path, [ahead]), {"target"})


def test_conversation_is_known_by_its_opening():
    later = [
        *MESSAGES,
        {"role": "assistant", "content": ANSWER},
        {"role": "user", "content": "And?"},
    ]
    other = [{"role": "user", "content": "And?"}]
    asked = [exchange(messages=m, prompt_token_ids=None) for m in (MESSAGES, later, other)]
    first, second, third = (text.conversation for text in reader().slice_of(asked).texts)
    assert first == second != third
