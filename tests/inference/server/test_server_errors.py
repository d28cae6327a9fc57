"""Whatever is sent, the answer has OpenAI's shape and names the field."""

from __future__ import annotations

import httpx2
import pytest

CLIENT = httpx2.Client(timeout=30)
COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def model(tiny_model, byte_tokenizer):
    model = tiny_model("qwen3", vocab_size=len(byte_tokenizer), max_position_embeddings=64)
    model.generation_config.eos_token_id = 257
    return model


@pytest.fixture
def url(serving, drafting_llm, model):
    return serving(drafting_llm("ngram", model), max_logprobs=5, max_num_queued_reqs=10)


def check_shape(answer, status: int, param: str | None = None, kind: str | None = None) -> str:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json" and set(answer.json()) == {"error"}
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["code"] == status
    assert error["param"] == param and (kind is None or error["type"] == kind) and error["message"]
    return error["message"]


COMPLETIONS = [  # (fields, the one at fault), with the prompt "x" where none is given
    ({"prompt": None}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": ["a", 3]}, "prompt"),
    ({"prompt": [5, 9999]}, "prompt"),
    ({"prompt": "x" * 64}, "prompt"),
    ({"prompt": "x" * 30, "max_tokens": 39}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"n": 19}, "n"),
    ({"prompt": ["x"] * 19}, "n"),
    ({"num_speculative_tokens": -1}, "num_speculative_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": "1"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"seed": 2**63}, "seed"),
    ({"logprobs": 6}, "logprobs"),
    ({"min_tokens": 20, "max_tokens": 5}, "min_tokens"),
    ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"logit_bias": {"300": 1}}, "logit_bias"),
    ({"stop": ["a", ""]}, "stop"),
    ({"stop_token_ids": [9999]}, "stop_token_ids"),
    ({"stream": 1}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"best_of": 3}, "best_of"),
    ({"echo": True}, "echo"),
    ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ({"no_such_field": 1}, "no_such_field"),
]
CHATS = [  # with the messages HI where none are given
    ({"messages": []}, "messages"),
    ({"messages": [{"content": "a"}]}, "messages"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"continue_final_message": True}, "continue_final_message"),
    ({"chat_template": "{{ 1 }}"}, "chat_template"),
    ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
]


@pytest.mark.slow
def test_every_fault_names_its_field(url):
    cases = [(COMPLETION, {"prompt": "x"} | body, param) for body, param in COMPLETIONS]
    cases += [(CHAT, {"messages": HI} | body, param) for body, param in CHATS]
    for path, body, param in cases:
        message = check_shape(CLIENT.post(url + path, json=body), 400, param, "BadRequestError")
        if param in ("structured_outputs", "response_format", "echo"):
            assert "--engine vllm" in message


def test_what_is_no_request_at_all(url):
    plain = {"content-type": "application/json"}
    surrogates = (b'{"prompt": "\\ud800"}', b'{"\\udfff": 1}')
    for content in (b"{", b"\xff\xfe", b"[" * 2000, b'{"prompt": NaN}', b"7", *surrogates):
        answer = CLIENT.post(url + COMPLETION, content=content, headers=plain)
        assert check_shape(answer, 400, answer.json()["error"]["param"])
    check_shape(CLIENT.get(url + "/nowhere"), 404, kind="NotFoundError")
    check_shape(CLIENT.get(url + COMPLETION), 405)
    missing = CLIENT.post(url + COMPLETION, json={"prompt": "x", "model": "gpt\n"})
    assert "tiny" in check_shape(missing, 404, "model", "NotFoundError")


def test_parameters_at_their_ends(url):
    """What is allowed is answered; what cannot be done is named."""
    for odd in (
        {"logit_bias": {str(i): -100 for i in range(259)}},
        {"repetition_penalty": 1e-308, "temperature": 1e308},
        {"top_p": 1e-308, "top_k": 1, "min_p": 1.0},
        {"allowed_token_ids": [7] * 500},
        {"bad_words": ["\U0001f600", "x", "é"]},
        {"prompt": "\U0001f468\u200d\U0001f469 \u202e\x00\uffff", "stop": ["\U0001f600"]},
    ):
        asked = {"prompt": "x", "temperature": 1, "seed": 1, "max_tokens": 4} | odd
        assert CLIENT.post(url + COMPLETION, json=asked).status_code in (200, 400)
        assert CLIENT.get(url + "/health").status_code == 200


def test_keys(serving, drafting_llm, model):
    url = serving(drafting_llm("off", model), api_key=("first", "second"))
    assert CLIENT.get(f"{url}/health").status_code == CLIENT.get(f"{url}/").status_code == 200
    policy = CLIENT.get(f"{url}/").headers["content-security-policy"]
    assert "default-src 'none'" in policy and "connect-src 'self'" in policy
    for path in ("/v1/models", "/v1/models/tiny", "/version", "/metrics"):
        for key in ("", "Bearer third", "first", "Bearer"):
            answer = CLIENT.get(url + path, headers={"Authorization": key})
            check_shape(answer, 401, kind="AuthenticationError")
            assert answer.headers["www-authenticate"] == "Bearer"
    for key in ("first", "second"):
        headers = {"Authorization": f"Bearer {key}"}
        assert CLIENT.get(f"{url}/v1/models", headers=headers).status_code == 200
    assert CLIENT.post(url + COMPLETION, json={"prompt": "x"}).status_code == 401


def test_a_fault_of_the_server_s_own_is_answered(serving, drafting_llm, model, monkeypatch):
    url = serving(drafting_llm("off", model))
    monkeypatch.setattr(serving.server(url).llm, "check", lambda *_: {}["missing"])
    answer = CLIENT.post(url + COMPLETION, json={"prompt": "x"})
    assert "missing" in check_shape(answer, 500, kind="InternalServerError")
    assert serving.server(url).engine.in_flight == 0
