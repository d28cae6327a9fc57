"""Whatever is sent, the answer has OpenAI's shape and names the field."""

from __future__ import annotations

import json

import httpx2
import pytest

CLIENT = httpx2.Client(timeout=30)
COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.fixture
def url(serving, drafting_llm, model):
    return serving(drafting_llm("ngram", model), max_num_queued_reqs=10)


KINDS = {  # status -> type and code
    400: ("BadRequestError", 400),
    401: ("invalid_request_error", "invalid_api_key"),
    404: ("NotFoundError", 404),
    405: ("Method Not Allowed", 405),
    500: ("InternalServerError", 500),
}


def check_shape(answer, status: int, param: str | None = None) -> str:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json" and set(answer.json()) == {"error"}
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    assert error["param"] == param
    assert (error["type"], error["code"]) == KINDS[status]
    return error["message"]


def turn(**fields) -> dict:
    return {"messages": [{"role": "user", "content": "hi", **fields}]}


FAULTS = [  # the field at fault is the first one; one case for each place that finds faults
    (COMPLETION, {"prompt": None}),  # missing
    (COMPLETION, {"prompt": ["a", 3]}),  # of another type
    (COMPLETION, {"prompt": [5, 9999]}),  # by the model
    (COMPLETION, {"prompt": "x" * 256}),
    (COMPLETION, {"max_tokens": 239, "prompt": "x" * 30}),  # by both together
    (COMPLETION, {"logprobs": -2}),  # by SamplingParams
    (COMPLETION, {"logprobs": 21}),  # by --max-logprobs
    (COMPLETION, {"logprobs": -1}),
    (CHAT, {"top_logprobs": 21, "logprobs": True}),
    (CHAT, {"top_logprobs": -1, "logprobs": True}),
    (COMPLETION, {"stop": ["x"] * 65}),  # by the limits of lists
    (CHAT, turn(tool_calls=5)),  # by what reads conversations
    (CHAT, {"chat_template_kwargs": {"chat_template": "x"}}),
    (COMPLETION, {"logit_bias": {"a": 1}}),
    (COMPLETION, {"stop_token_ids": [9999]}),
    (COMPLETION, {"stream_options": {"include_usage": True}}),
    (COMPLETION, {"stream_options": {"include_usage": "no"}, "stream": True}),
    (COMPLETION, {"stream_options": {"no_such_field": 1}, "stream": True}),
    (COMPLETION, {"best_of": 3}),  # vLLM's alone
    (COMPLETION, {"no_such_field": 1}),
    (COMPLETION, {"self": 1}),  # names of the code
    (COMPLETION, {"__dataclass_self__": 1}),
    (CHAT, {"messages": []}),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
    (CHAT, {"top_logprobs": 2}),
    (CHAT, {"max_completion_tokens": 0}),
    (CHAT, {"response_format": {"type": "json_schema"}}),
]


@pytest.mark.slow
def test_every_fault_names_its_field(url):
    defaults = {
        COMPLETION: {"prompt": "x"},
        CHAT: {"messages": [{"role": "user", "content": "hi"}]},
    }
    for path, fields in FAULTS:
        answer = CLIENT.post(url + path, json=defaults[path] | fields)
        field = next(iter(fields))
        check_shape(answer, 400, field)
        if path == CHAT and field == "max_completion_tokens":  # SamplingParams calls it max_tokens
            assert answer.json()["error"]["message"].startswith(f"{field}: ")


def test_bodies_beyond_the_limit_are_refused_before_they_are_read_whole(
    serving, drafting_llm, model
):
    """Whether their length is told before or not."""
    url = serving(drafting_llm("off", model), max_request_bytes=100)
    longest = json.dumps({"prompt": "x", "max_tokens": 1}).encode().ljust(100)
    for body, status in ((longest, 200), (longest + b" ", 413)):
        for content in (body, iter([body])):
            assert CLIENT.post(url + COMPLETION, content=content).status_code == status


@pytest.mark.parametrize("chat", [False, True])
def test_prompts_beyond_the_context_are_refused_before_they_are_tokenized(
    serving, drafting_llm, model, byte_tokenizer, monkeypatch, chat
):
    url = serving(drafting_llm("off", model))
    monkeypatch.setattr(type(byte_tokenizer), "_encode_plus", lambda *_, **__: {}["tokenized"])
    text = "x" * 5000
    path, fields = (CHAT, turn(content=text)) if chat else (COMPLETION, {"prompt": text})
    check_shape(CLIENT.post(url + path, json=fields), 400, next(iter(fields)))


def test_logprobs_beyond_the_default_are_for_a_server_that_allows_them(
    serving, drafting_llm, model
):
    """-1 is the vocabulary, in the flag and in a request."""
    url = serving(drafting_llm("off", model), max_logprobs=-1)
    request = {"prompt": "x", "max_tokens": 1, "logprobs": -1}
    (choice,) = CLIENT.post(url + COMPLETION, json=request).json()["choices"]
    asked = turn() | {"max_tokens": 1, "logprobs": True, "top_logprobs": -1}
    (chat,) = CLIENT.post(url + CHAT, json=asked).json()["choices"]
    assert len(choice["logprobs"]["top_logprobs"][0]) > 128  # by text: bytes alone have none
    assert len(chat["logprobs"]["content"][0]["top_logprobs"]) == model.config.vocab_size


def test_what_is_no_request_at_all_is_answered(url):
    for content in (b"{", b"\xff\xfe", b"[" * 2000, b"7", b'{"prompt": "\\ud800"}'):
        check_shape(CLIENT.post(url + COMPLETION, content=content), 400)
    check_shape(CLIENT.get(url + "/nowhere"), 404)
    check_shape(CLIENT.get(url + COMPLETION), 405)
    missing = CLIENT.post(url + COMPLETION, json={"prompt": "x", "model": "gpt\n"})
    assert "tiny" in check_shape(missing, 404, "model")


INTEGER = 2**63  # beyond torch's integers
ENDS = [  # field -> values at its ends, and values beyond them
    ("temperature", (0, 5e-324, 1e20), (-5e-324, 1e21)),
    ("top_p", (5e-324, 1), (0, 1 + 1e-9)),
    ("top_k", (-1, 0, 260, INTEGER - 1), (-2,)),
    ("min_p", (0, 1), (-1e-9, 1 + 1e-9)),
    ("seed", (-INTEGER, INTEGER - 1), (-INTEGER - 1, INTEGER)),
    ("repetition_penalty", (1e-3, 1e3), (9e-4, 1001)),
    ("presence_penalty", (-2, 2), (-2.1, 2.1)),
    ("frequency_penalty", (-2, 2), (-2.1, 2.1)),
    ("logit_bias", ({"0": -1e4}, {"258": 1e4}), ({"0": -10001}, {"258": 10001}, {"259": 0})),
    ("allowed_token_ids", ([258], list(range(259))), ([], [259], [1] * 260)),
    ("max_tokens", (1, 255), (0, 256)),
    ("min_tokens", (0, 4), (-1, 5)),
    ("n", (1, 18), (0, 19)),  # the rows and the queue
]


@pytest.mark.slow
@pytest.mark.parametrize("field, inside, beyond", ENDS, ids=[field for field, *_ in ENDS])
def test_parameter_at_its_ends_is_served_and_beyond_them_refused(url, field, inside, beyond):
    request = {"prompt": "x", "seed": 1, "max_tokens": 4, "ignore_eos": True}
    for value in inside:
        answer = CLIENT.post(url + COMPLETION, json=request | {field: value})
        assert answer.status_code == 200, answer.text
        asked = (request | {field: value})["max_tokens"]
        choices = answer.json()["choices"]
        assert answer.json()["usage"]["completion_tokens"] == asked * len(choices)
    for value in beyond:
        check_shape(CLIENT.post(url + COMPLETION, json=request | {field: value}), 400, field)


def test_text_beyond_the_basic_plane_and_controls_is_written_on(url):
    text = "\U0001f468\u200d\U0001f469 \u202e\x00\uffff"
    request = {"prompt": text, "stop": ["\U0001f600"], "max_tokens": 4}
    answer = CLIENT.post(url + COMPLETION, json=request)
    assert answer.status_code == 200
    assert answer.json()["usage"]["prompt_tokens"] == len(text.encode())


def test_routes_are_behind_the_keys(serving, drafting_llm, model):
    url = serving(drafting_llm("off", model), api_key=("first", "second"))
    assert CLIENT.get(f"{url}/health").status_code == CLIENT.get(f"{url}/").status_code == 200
    policy = CLIENT.get(f"{url}/").headers["content-security-policy"]
    assert "default-src 'none'" in policy and "connect-src 'self'" in policy
    for path in ("/v1/models", "/metrics"):
        for key in ("", "Bearer third", "first"):
            answer = CLIENT.get(url + path, headers={"Authorization": key})
            check_shape(answer, 401)
    for key in ("first", "second"):
        headers = {"Authorization": f"Bearer {key}"}
        assert CLIENT.get(f"{url}/v1/models", headers=headers).status_code == 200
    assert CLIENT.post(url + COMPLETION, json={"prompt": "x"}).status_code == 401


def test_fault_of_the_server_is_answered(serving, drafting_llm, model, monkeypatch):
    url = serving(drafting_llm("off", model))
    monkeypatch.setattr(serving.server(url).llm.checker, "check", lambda *_: {}["missing"])
    answer = CLIENT.post(url + COMPLETION, json={"prompt": "x"})
    assert "missing" in check_shape(answer, 500)
    assert serving.server(url).engine.in_flight == 0
