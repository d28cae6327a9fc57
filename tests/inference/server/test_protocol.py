"""What a request may hold: at its limit it is read, and one more is refused by name."""

from __future__ import annotations

import json

import pytest

from draftsmith.inference.server.api_errors import APIError
from draftsmith.inference.server.protocol import (
    MOST_CHARACTERS,
    MOST_ENTRIES,
    MOST_LEVELS,
    ChatRequest,
    CompletionRequest,
)
from draftsmith.inference.server.serve_options import ServerOptions

OPTIONS = ServerOptions(served_model_name=("tiny",))


def nested(levels: int) -> list:
    value: list = []
    for _ in range(levels - 1):
        value = [value]
    return value


def entries(field: str, count: int) -> object:
    if field == "logit_bias":
        return {str(token): 1 for token in range(count)}
    return [1 if field == "stop_token_ids" else "x"] * count


MOST = [  # field, the most that it may hold, and one more
    *(
        (field, entries(field, most), entries(field, most + 1))
        for field, most in MOST_ENTRIES.items()
    ),
    ("stop", "x" * MOST_CHARACTERS, "x" * (MOST_CHARACTERS + 1)),
    ("bad_words", ["x" * MOST_CHARACTERS], ["x" * (MOST_CHARACTERS + 1)]),
    ("metadata", nested(MOST_LEVELS - 1), nested(MOST_LEVELS)),  # the body is a level, too
]


def read(**fields: object) -> CompletionRequest:
    body = json.dumps({"prompt": "x", **fields}).encode()
    return CompletionRequest.read(body, OPTIONS)[0]


@pytest.mark.parametrize(
    "field", ["user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"]
)
def test_read_takes_names_of_openai_that_change_no_answer(field):
    assert read(**{field: "jane"}).prompt == ["x"]


def test_read_takes_null_for_the_default():
    nulls = dict.fromkeys(["stream", "stream_options", "max_tokens", "logit_bias", "stop", "seed"])
    assert read(**nulls) == read()


def test_read_takes_openais_name_of_today_for_the_longest_response_before_the_old_one():
    body = {"messages": [], "max_tokens": 9, "max_completion_tokens": 4}
    _, params = ChatRequest.read(json.dumps(body).encode(), OPTIONS)
    assert params.max_tokens == 4


@pytest.mark.parametrize("field, most, more", MOST, ids=[field for field, *_ in MOST])
def test_read_takes_what_a_request_may_hold_and_no_more(field, most, more):
    assert read(**{field: most}).prompt == ["x"]
    with pytest.raises(APIError) as error:
        read(**{field: more})
    assert (error.value.status_code, error.value.param) == (400, field)
