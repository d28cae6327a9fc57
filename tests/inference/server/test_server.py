"""The server through OpenAI's own client: every answer is what the offline runtime writes, in
OpenAI's shape."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest
from openai import NotFoundError, OpenAI

from inference import SamplingParams
from inference.entrypoints.prompts import chat_prompts
from inference.metrics import acceptance_length

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Why is the sky blue?"},
]
LIMITS = ("unsaid", None, 0, 1, 9)  # num_speculative_tokens of a request
TEMPLATE = (
    "{% for t in tools or [] %}<tool>{{ t.function.name }}</tool>{% endfor %}"
    "{% for m in messages %}<s>{{ m.role }}:{{ m.content }}{% for c in m.tool_calls or [] %}"
    "[{{ c.function.name }} {{ c.function.arguments.city }}]{% endfor %}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% endif %}{% if shout %}!{% endif %}"
)


@pytest.fixture(scope="module")
def model(tiny_model, byte_tokenizer):
    model = tiny_model("qwen3", vocab_size=len(byte_tokenizer), max_position_embeddings=256)
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture(scope="module")
def offline(drafting_llm, model):
    """The same target without drafting and without a server."""
    return drafting_llm("off", model)


@pytest.fixture
def url(serving, drafting_llm, model):
    return serving(drafting_llm("ngram", model), chat_template=TEMPLATE)


@pytest.fixture
def client(url):
    with OpenAI(base_url=f"{url}/v1", api_key="EMPTY", max_retries=0) as client:
        yield client


def text_of(offline, prompt, **params) -> str:
    (output,) = offline.generate(
        prompt, SamplingParams(**{"temperature": 0, "max_tokens": 16, **params}), False
    )
    return output.outputs[0].text


def test_the_guide_s_client(url, offline):
    """Lines of vLLM's guide to serving with a drafter, with this server's address."""
    openai_api_key = "EMPTY"
    openai_api_base = f"{url}/v1"
    client = OpenAI(
        api_key=openai_api_key,
        base_url=openai_api_base,
    )
    models = client.models.list()
    model = models.data[0].id
    assert model == "tiny"
    for stream in (False, True):
        completion = client.completions.create(
            model=model,
            prompt="The future of AI is",
            echo=False,
            n=1,
            stream=stream,
        )
        if stream:
            chunks = list(completion)
            assert {c.object for c in chunks} == {"text_completion"} and len(
                {c.id for c in chunks}
            ) == 1
            assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 1)
            assert chunks[-1].choices[0].finish_reason in ("stop", "length")
        else:
            assert completion.usage.prompt_tokens == len("The future of AI is")
            assert (
                completion.usage.completion_tokens == 16
                and completion.choices[0].finish_reason == "length"
            )
    greedy = client.completions.create(model=model, prompt="The future of AI is", temperature=0)
    assert greedy.choices[0].text == text_of(offline, "The future of AI is")


def test_a_streaming_chat(client, offline, byte_tokenizer):
    (prompt,) = chat_prompts(
        CHAT, byte_tokenizer, {"chat_template": TEMPLATE, "add_generation_prompt": True}
    )
    expected = text_of(offline, {"prompt_token_ids": prompt.token_ids}, max_tokens=24)
    asked = dict(model="tiny", messages=CHAT, temperature=0, max_completion_tokens=24)
    whole = client.chat.completions.create(**asked)
    assert (
        whole.choices[0].message.content == expected
        and whole.choices[0].message.role == "assistant"
    )
    *chunks, last = client.chat.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}
    )
    assert "".join(c.choices[0].delta.content for c in chunks) == expected
    assert [c.choices[0].delta.role for c in chunks] == ["assistant"] + [None] * (len(chunks) - 1)
    assert [c.choices[0].finish_reason for c in chunks[-2:]] == [None, "length"] and len(chunks) > 3
    assert all(c.usage is None for c in chunks) and not last.choices
    assert last.usage == whole.usage and last.usage.prompt_tokens == len(prompt.token_ids)


def test_prompts_in_every_shape(client, offline, byte_tokenizer):
    ids = [byte_tokenizer(text).input_ids for text in ("first", "second one")]
    texts = [text_of(offline, {"prompt_token_ids": each}) for each in ids]
    for prompt, expected in (
        ("first", texts[:1]),
        (ids[0], texts[:1]),
        (["first", "second one"], texts),
        (ids, texts),
    ):
        answer = client.completions.create(model="tiny", prompt=prompt, temperature=0, n=2)
        assert [c.index for c in answer.choices] == list(range(2 * len(expected)))
        assert [c.text for c in answer.choices] == [text for text in expected for _ in range(2)]
        assert answer.usage.prompt_tokens == sum(map(len, ids[: len(expected)]))
        assert answer.usage.completion_tokens == 32 * len(expected)
        pieces = [""] * len(answer.choices)
        for chunk in client.completions.create(
            model="tiny", prompt=prompt, temperature=0, n=2, stream=True
        ):
            pieces[chunk.choices[0].index] += chunk.choices[0].text
        assert pieces == [c.text for c in answer.choices]


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(client, offline, stream):
    """Those of the offline runtime, at offsets that count characters."""
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=2)
    (output,) = offline.generate("once", params, False)
    asked = dict(model="tiny", prompt="once", temperature=0, max_tokens=6, logprobs=2)
    parts = client.completions.create(**asked, stream=stream)
    logprobs = [
        choice.logprobs
        for part in (parts if stream else [parts])
        for choice in part.choices
        if choice.logprobs
    ]
    joined = {
        name: [x for each in logprobs for x in getattr(each, name)]
        for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs")
    }
    tokens, entries = output.outputs[0].token_ids, output.outputs[0].logprobs
    expected = [each[token].logprob for token, each in zip(tokens, entries, strict=True)]
    assert joined["token_logprobs"] == pytest.approx(expected, abs=1e-5)
    assert len(joined["tokens"]) == 6 and joined["text_offset"][0] == 0
    assert joined["text_offset"] == sorted(joined["text_offset"])
    assert all(1 <= len(top) <= 3 for top in joined["top_logprobs"])


def test_chat_logprobs(client):
    answer = client.chat.completions.create(
        model="tiny", messages=CHAT, temperature=0, max_tokens=5, logprobs=True, top_logprobs=3
    )
    content = answer.choices[0].logprobs.content
    assert len(content) == 5 and all(len(each.top_logprobs) == 3 for each in content)
    for each in content:
        assert each.logprob == each.top_logprobs[0].logprob  # greedy: the most probable one
        assert bytes(each.bytes) == each.token.encode()  # as in vLLM
        best = [other.logprob for other in each.top_logprobs]
        assert best == sorted(best, reverse=True)


@pytest.mark.parametrize(
    "extra",
    [
        {"top_k": 3, "min_p": 0.05, "repetition_penalty": 1.3, "seed": 5, "temperature": 0.9},
        {
            "ignore_eos": True,
            "min_tokens": 8,
            "stop_token_ids": [101, 32],
            "include_stop_str_in_output": True,
        },
        {
            "allowed_token_ids": [97, 98, 99],
            "seed": 2,
            "temperature": 1.0,
            "frequency_penalty": 0.5,
        },
        {"logit_bias": {"120": 50}, "bad_words": ["xx"]},
        {
            "skip_special_tokens": False,
            "presence_penalty": 1.0,
            "top_p": 0.8,
            "seed": 9,
            "temperature": 0.7,
        },
    ],
)
def test_parameters_of_vllm(client, drafting_llm, model, extra):
    """As the offline runtime takes them, random numbers included."""
    params = {"temperature": 0, "max_tokens": 12} | extra
    answer = client.completions.create(model="tiny", prompt="parameters", extra_body=params)
    if "logit_bias" in params:
        params["logit_bias"] = {int(token): bias for token, bias in params["logit_bias"].items()}
    assert answer.choices[0].text == text_of(drafting_llm("ngram", model), "parameters", **params)


def test_stop_strings(client, offline, byte_tokenizer):
    letters = {"seed": 4, "allowed_token_ids": byte_tokenizer("abcdefgh").input_ids}
    whole = text_of(offline, "stop here", max_tokens=40, temperature=1.0, **letters)
    stop = whole[20:23]
    asked = dict(model="tiny", prompt="stop here", max_tokens=40, stop=[stop], extra_body=letters)
    answer = client.completions.create(**asked)
    assert (
        answer.choices[0].text == whole[: whole.find(stop)]
        and answer.choices[0].finish_reason == "stop"
    )
    assert answer.choices[0].stop_reason == stop
    chunks = client.completions.create(**asked, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole[: whole.find(stop)]


def test_what_the_chat_template_is_given(url, byte_tokenizer):
    """Tools, calls with their arguments as objects, texts in parts, and options of its own."""
    call = {
        "id": "c",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"city": "Bern"}'},
    }
    asked = {
        "messages": [
            {
                "role": "user",
                "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            },
            {"role": "assistant", "content": "", "tool_calls": [call]},
        ],
        "tools": [
            {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
        ],
        "chat_template_kwargs": {"shout": True},
    }
    turns = "<s>user:a\nb</s><s>assistant:[weather Bern]</s><s>assistant:"
    assert prompt_of(url, byte_tokenizer, asked) == f"<tool>weather</tool>{turns}!"
    assert prompt_of(url, byte_tokenizer, asked | {"tool_choice": "none"}) == f"{turns}!"
    continued = {
        "messages": [{"role": "assistant", "content": "So"}],
        "continue_final_message": True,
    }
    assert prompt_of(url, byte_tokenizer, continued).endswith("assistant:So")


def prompt_of(url, tokenizer, asked) -> str:
    """The prompt that the chat template makes of a request."""
    asked = asked | {"max_tokens": 1, "return_token_ids": True}
    answer = httpx2.post(f"{url}/v1/chat/completions", json=asked, timeout=60).json()
    assert len(answer["choices"][0]["token_ids"]) == 1
    return tokenizer.decode(answer["prompt_token_ids"])


def test_state(url, client):
    assert httpx2.get(f"{url}/health").status_code == 200
    assert httpx2.get(f"{url}/version").json()["version"]
    assert client.models.list().data[0].max_model_len == 256
    assert client.models.retrieve("tiny") == client.models.list().data[0]
    with pytest.raises(NotFoundError):
        client.models.retrieve("org/other")


def test_acceptance_of_a_response(client):
    """In vLLM's fields, when asked for; not for several responses, whose rounds nobody could tell
    apart."""
    asked = dict(model="tiny", prompt="abababababab", max_tokens=40, temperature=0)
    detailed = {"per_request_spec_decode_metrics": "detailed", "allowed_token_ids": [97, 98]}
    found = client.completions.create(**asked, extra_body=detailed).metrics["speculative_decoding"]
    histogram, accepted = found["acceptance_histogram"], found["per_step_accepted"]
    assert len(histogram) == found["num_spec_tokens"] + 1 == 4
    assert (
        sum(histogram)
        == found["num_spec_steps"]
        == len(accepted)
        == len(found["per_step_drafted"])
        > 0
    )
    assert (
        sum(j * count for j, count in enumerate(histogram))
        == found["num_accepted_draft_tokens"]
        == sum(accepted)
    )
    assert sum(found["per_step_drafted"]) == found["num_draft_tokens"]
    expected = acceptance_length(found["num_accepted_draft_tokens"], found["num_spec_steps"])
    assert found["mean_acceptance_length"] == pytest.approx(expected)
    *_, last = client.completions.create(**asked, extra_body=detailed, stream=True)
    assert last.metrics["speculative_decoding"] == found
    summary = client.completions.create(
        **asked, extra_body=detailed | {"per_request_spec_decode_metrics": "summary"}
    )
    assert summary.metrics["speculative_decoding"]["per_step_accepted"] is None
    assert client.completions.create(**asked).metrics is None
    assert client.completions.create(**asked, n=2, extra_body=detailed).metrics is None


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_says_how_much_is_drafted_for_it(url, client, serving, stream):
    """Drafting off and on beside each other: the same text, and each response's own acceptance."""
    asked = dict(model="tiny", prompt="abababababab", max_tokens=40, temperature=0, stream=stream)
    told = {"per_request_spec_decode_metrics": "detailed", "allowed_token_ids": [97, 98]}
    before = serving.server(url).llm.get_metrics().num_drafts

    def ask(most):
        extra = told | ({} if most == "unsaid" else {"num_speculative_tokens": most})
        answer = client.completions.create(**asked, extra_body=extra)
        parts = list(answer) if stream else [answer]
        text = "".join(choice.text for part in parts for choice in part.choices)
        return text, parts[-1].metrics["speculative_decoding"]

    with ThreadPoolExecutor() as pool:
        answers = dict(zip(LIMITS, pool.map(ask, LIMITS), strict=True))
    assert len({text for text, _ in answers.values()}) == 1
    for most, (_, found) in answers.items():
        longest = 3 if most in ("unsaid", None, 9) else most
        assert found["num_spec_tokens"] == longest == len(found["acceptance_histogram"]) - 1
        assert max(found["per_step_drafted"], default=0) == longest
    assert answers[0][1]["num_spec_steps"] == 0 and answers[0][1]["mean_acceptance_length"] == 1
    drafts = sum(found["num_spec_steps"] for _, found in answers.values())
    assert serving.server(url).llm.get_metrics().num_drafts - before == drafts


def test_metrics_agree_with_what_clients_got(url, client, serving):
    usages = [
        client.completions.create(
            model="tiny", prompt="m" * length, max_tokens=20, temperature=0, n=n
        ).usage
        for length, n in ((5, 1), (9, 2), (30, 1))
    ]
    values = {
        line.rpartition(" ")[0]: float(line.rpartition(" ")[2])
        for line in httpx2.get(f"{url}/metrics").text.splitlines()
        if not line.startswith("#")
    }
    labels = 'engine="0",model_name="tiny"'
    assert (
        values[f"vllm:generation_tokens_total{{{labels}}}"]
        == sum(u.completion_tokens for u in usages)
        == 80
    )
    assert (
        values[f"vllm:prompt_tokens_total{{{labels}}}"] == 5 + 2 * 9 + 30
    )  # a prompt is read once per response
    success = 'vllm:request_success_total{engine="0",finished_reason="%s",model_name="tiny"}'
    assert values[success % "length"] == 4 and values[success % "stop"] == 0
    assert values[f"vllm:time_to_first_token_seconds_count{{{labels}}}"] == 4
    assert values[f"vllm:e2e_request_latency_seconds_count{{{labels}}}"] == 4
    assert (
        values[f"vllm:num_requests_running{{{labels}}}"]
        == values[f"vllm:num_requests_waiting{{{labels}}}"]
        == 0
    )
    counters = serving.server(url).llm.get_metrics()
    for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
        assert values[f"vllm:spec_decode_{name}_total{{{labels}}}"] == getattr(counters, name) > 0
    places = [
        values[f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{labels},position="{i}"}}']
        for i in range(3)
    ]
    assert sum(places) == counters.num_accepted_tokens and places == sorted(places, reverse=True)
