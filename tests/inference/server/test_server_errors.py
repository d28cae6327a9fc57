"""Whatever is sent, the answer has OpenAI's shape and names the field; and the server's own
document is true."""

from __future__ import annotations

import json
import os
import time
from collections import Counter

import httpx2
import pytest

schemathesis = pytest.importorskip("schemathesis")
from hypothesis import HealthCheck, Phase, given, settings  # noqa: E402
from schemathesis.checks import not_a_server_error  # noqa: E402
from schemathesis.specs.openapi import checks as openapi_checks  # noqa: E402

CLIENT = httpx2.Client(timeout=30)
COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
LIMITS = {
    "max_n": 4,
    "max_output_tokens": 40,
    "max_prompt_tokens": 30,
    "max_logprobs": 5,
    "max_body_bytes": 5000,
}


@pytest.fixture(scope="module")
def model(tiny_model, byte_tokenizer):
    model = tiny_model("qwen3", vocab_size=len(byte_tokenizer), max_position_embeddings=64)
    model.generation_config.eos_token_id = 257
    return model


@pytest.fixture
def url(serving, drafting_llm, model):
    return serving(drafting_llm("ngram", model), **LIMITS)


def check_shape(answer, status: int, param: str | None = None, kind: str | None = None) -> str:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json" and set(answer.json()) == {"error"}
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["code"] == status
    assert error["param"] == param and (kind is None or error["type"] == kind) and error["message"]
    return error["message"]


BAD_SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": 3}}}
FAULTS = [
    (COMPLETION, {}, "prompt"),
    (COMPLETION, {"prompt": ""}, "prompt"),
    (COMPLETION, {"prompt": ["a", 3]}, "prompt"),
    (COMPLETION, {"prompt": [5, 9999]}, "prompt"),
    (COMPLETION, {"prompt": "x" * 31}, "prompt"),
    (COMPLETION, {"prompt": "x" * 30, "max_tokens": 39}, "max_tokens"),
    (COMPLETION, {"prompt": "x", "max_tokens": 41}, "max_tokens"),
    (COMPLETION, {"prompt": "x", "max_tokens": 0}, None),
    (COMPLETION, {"prompt": "x", "n": 5}, "n"),
    (COMPLETION, {"prompt": "x", "num_speculative_tokens": -1}, "num_speculative_tokens"),
    (COMPLETION, {"prompt": ["x"] * 5}, "prompt"),
    (COMPLETION, {"prompt": "x", "temperature": -1}, "temperature"),
    (COMPLETION, {"prompt": "x", "temperature": 1e-9}, "temperature"),
    (COMPLETION, {"prompt": "x", "temperature": "1"}, "temperature"),
    (COMPLETION, {"prompt": "x", "top_p": 0}, "top_p"),
    (COMPLETION, {"prompt": "x", "seed": 2**63}, "seed"),
    (COMPLETION, {"prompt": "x", "logprobs": 6}, "logprobs"),
    (COMPLETION, {"prompt": "x", "min_tokens": 20, "max_tokens": 5}, "min_tokens"),
    (COMPLETION, {"prompt": "x", "logit_bias": {"a": 1}}, "logit_bias.a"),
    (COMPLETION, {"prompt": "x", "logit_bias": {"300": 1}}, "logit_bias"),
    (COMPLETION, {"prompt": "x", "stop": ["a", ""]}, "stop[1]"),
    (COMPLETION, {"prompt": "x", "stop_token_ids": [9999]}, "stop_token_ids"),
    (COMPLETION, {"prompt": "x", "stream_options": {}}, None),
    (COMPLETION, {"prompt": "x", "use_beam_search": True}, "use_beam_search"),
    (COMPLETION, {"prompt": "x", "best_of": 3}, None),
    (COMPLETION, {"prompt": "x", "no_such_field": 1}, "no_such_field"),
    (COMPLETION, {"prompt": "x", "structured_outputs": {"regex": "("}}, "structured_outputs"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": [{"content": "a"}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[0].content[0]",
    ),
    (CHAT, {"messages": HI, "top_logprobs": 2}, None),
    (CHAT, {"messages": HI, "tool_choice": "required"}, "tool_choice"),
    (CHAT, {"messages": HI, "chat_template": "{{ 1 }}"}, "chat_template"),
    (CHAT, {"messages": HI, "chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
    (CHAT, {"messages": HI, "chat_template_kwargs": {"self": 1}}, "chat_template_kwargs"),
    (CHAT, {"messages": HI, "chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs"),
    (
        CHAT,
        {"messages": HI, "response_format": {"type": "json_schema"}},
        "response_format.json_schema",
    ),
    (CHAT, {"messages": HI, "max_completion_tokens": 0}, "max_completion_tokens"),
    (CHAT, {"messages": HI, "response_format": BAD_SCHEMA}, "response_format"),
    ("/tokenize", {"prompt": 5}, "prompt"),
    ("/detokenize", {"tokens": [99999]}, "tokens"),
]


@pytest.mark.slow
def test_every_fault_names_its_field(url):
    for path, body, param in FAULTS:
        answer = CLIENT.post(url + path, json=body)
        try:
            check_shape(answer, 400, param, "BadRequestError")
        except AssertionError as error:
            raise AssertionError(f"{path} {body}: {answer.text}") from error


def test_a_value_of_a_right_type_is_not_blamed_for_its_type(url):
    answer = CLIENT.post(url + COMPLETION, json={"prompt": "x", "stop": ""})
    message = check_shape(answer, 400, "stop")
    assert "at least 1 character" in message and "list" not in message


def test_what_is_no_request_at_all(url):
    plain = {"content-type": "application/json"}
    surrogates = (b'{"prompt": "\\ud800"}', b'{"\\udfff": 1}')
    for content in (b"{", b"\xff\xfe", b"[" * 2000, b'{"prompt": NaN}', b"7", *surrogates):
        answer = CLIENT.post(url + COMPLETION, content=content, headers=plain)
        assert check_shape(answer, 400, answer.json()["error"]["param"])
    check_shape(
        CLIENT.post(url + COMPLETION, content=b" " * 5001, headers=plain),
        413,
        kind="RequestTooLargeError",
    )
    chunks = iter([b" " * 3000] * 2)  # of no announced length
    check_shape(CLIENT.post(url + COMPLETION, content=chunks, headers=plain), 413)
    check_shape(CLIENT.get(url + "/nowhere"), 404, kind="NotFoundError")
    check_shape(CLIENT.get(url + COMPLETION), 405)
    missing = CLIENT.post(url + COMPLETION, json={"prompt": "x", "model": "gpt\n"})
    assert "tiny" in check_shape(missing, 404, "model", "NotFoundError")


def test_keys(serving, drafting_llm, model):
    url = serving(drafting_llm("off", model), api_key=("first", "second"))
    assert CLIENT.get(f"{url}/health").status_code == 200
    for path in ("/v1/models", "/version", "/metrics", "/openapi.json", "/nowhere"):
        for headers in (
            {},
            {"Authorization": "Bearer third"},
            {"Authorization": "first"},
            {"Authorization": "Bearer"},
        ):
            answer = CLIENT.get(url + path, headers=headers)
            check_shape(answer, 401, kind="AuthenticationError")
            assert answer.headers["www-authenticate"] == "Bearer"
    for key in ("first", "second"):
        assert (
            CLIENT.get(f"{url}/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code
            == 200
        )
    assert CLIENT.post(url + COMPLETION, json={"prompt": "x"}).status_code == 401


def test_a_fault_of_the_server_s_own_says_nothing_of_the_request(
    serving, drafting_llm, model, caplog
):
    url = serving(drafting_llm("off", model))
    broken = "a message with the prompt in it: "
    serving.server(url).parser.completion = lambda request: (_ for _ in ()).throw(
        KeyError(broken + request.prompt)
    )
    answer = CLIENT.post(url + COMPLETION, json={"prompt": "topsecret"})
    check_shape(answer, 500, kind="InternalServerError")
    assert "KeyError" in caplog.text and "topsecret" not in caplog.text + answer.text
    assert serving.server(url).engine.in_flight == 0


def test_logs_hold_counts_and_no_texts(serving, drafting_llm, model, caplog):
    caplog.set_level("DEBUG", logger="inference")
    for wanted in (False, True):
        caplog.clear()
        url = serving(drafting_llm("ngram", model), enable_log_requests=wanted)
        for stream in (False, True):
            assert (
                CLIENT.post(
                    url + COMPLETION, json={"prompt": "topsecret", "stream": stream}
                ).status_code
                == 200
            )
        engine, end = serving.server(url).engine, time.monotonic() + 10
        while (
            engine.in_flight and time.monotonic() < end
        ):  # a stream's client knows of its end first
            time.sleep(0.01)
        assert "topsecret" not in caplog.text
        lines = [each for each in caplog.messages if "9 prompt tokens, 16 written" in each]
        assert len(lines) == (2 if wanted else 0)


EXAMPLES = int(os.environ.get("DRAFTSMITH_SCHEMA_EXAMPLES", "25"))  # of each operation
CHECKS = [
    not_a_server_error,
    openapi_checks.status_code_conformance,
    openapi_checks.content_type_conformance,
    openapi_checks.response_schema_conformance,
    openapi_checks.negative_data_rejection,
    openapi_checks.missing_required_header,
    openapi_checks.unsupported_method,
]


@pytest.mark.slow
def test_the_document_is_true(serving, drafting_llm, model):
    """Generated requests, right and wrong: no 5xx, no hang, nothing that the document does not
    say."""
    url = serving(drafting_llm("ngram", model), **LIMITS | {"request_timeout_s": 20})
    before = CLIENT.post(url + COMPLETION, json={"prompt": "x", "temperature": 0}).json()["choices"]
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    operations = [each.ok() for each in schema.get_all_operations()]
    assert {each.path for each in operations} >= {
        COMPLETION,
        CHAT,
        "/tokenize",
        "/detokenize",
        "/metrics",
        "/health",
    }
    sent: Counter[str] = Counter()
    for operation in operations:
        examples = EXAMPLES if operation.method == "post" else 2

        @settings(
            max_examples=examples,
            deadline=None,
            database=None,
            derandomize=True,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        def run(case):
            sent[case.operation.path] += 1
            case.call_and_validate(checks=CHECKS, timeout=25)

        given(case=operation.as_strategy())(run)()
    print(f"{sent.total()} requests: {dict(sent)}")
    assert all(sent[path] >= EXAMPLES for path in (COMPLETION, CHAT, "/tokenize", "/detokenize"))
    after = CLIENT.post(url + COMPLETION, json={"prompt": "x", "temperature": 0}).json()["choices"]
    assert json.dumps(after) == json.dumps(before)
