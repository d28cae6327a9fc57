"""The server through OpenAI's own client: every answer is what the offline runtime writes, in
OpenAI's shape."""

from __future__ import annotations

import collections
import json
import queue
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate

import httpx2
import pytest
from openai import OpenAI

from draftsmith.inference import SamplingParams
from draftsmith.inference.entrypoints.prompts import chat_prompts
from draftsmith.inference.metrics import acceptance_length
from draftsmith.inference.server import app

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Why is the sky blue?"},
]
TEMPLATE = (
    "{% for t in tools or [] %}<tool>{{ t.function.name }}</tool>{% endfor %}"
    "{% for m in messages %}<s>{{ m.role }}:{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% endif %}{% if shout %}!{% endif %}"
)
GREEDY = {"model": "tiny", "temperature": 0}


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


def output_of(llm, prompt, **params):
    params = SamplingParams(**{"temperature": 0, "max_tokens": 16, **params})
    return llm.generate(prompt, params, False)[0].outputs[0]


def test_completions_of_openais_client(client, offline):
    request = {"model": client.models.list().data[0].id, "prompt": "The future of AI is", "n": 1}
    whole = client.completions.create(**request, echo=False)
    assert whole.usage.prompt_tokens == len("The future of AI is")
    assert (whole.usage.completion_tokens, whole.choices[0].finish_reason) == (16, "length")
    *chunks, last = client.completions.create(**request, stream=True)
    assert {c.object for c in chunks} == {"text_completion"} and {c.id for c in chunks} == {last.id}
    assert {c.choices[0].finish_reason for c in chunks} == {None}
    assert last.choices[0].finish_reason == "length"
    greedy = client.completions.create(**request, temperature=0)
    assert greedy.choices[0].text == output_of(offline, "The future of AI is").text


def test_a_streaming_chat(client, offline, byte_tokenizer):
    options = {"chat_template": TEMPLATE, "add_generation_prompt": True}
    (prompt,) = chat_prompts(CHAT, byte_tokenizer, options)
    expected = output_of(offline, {"prompt_token_ids": prompt.token_ids}, max_tokens=24).text
    request = GREEDY | {"messages": CHAT, "max_completion_tokens": 24}
    whole = client.chat.completions.create(**request)
    message = whole.choices[0].message
    assert (message.content, message.role) == (expected, "assistant")
    *chunks, last = client.chat.completions.create(
        **request, stream=True, stream_options={"include_usage": True}
    )
    assert "".join(c.choices[0].delta.content for c in chunks) == expected
    assert [c.choices[0].delta.role for c in chunks] == ["assistant"] + [None] * (len(chunks) - 1)
    assert [c.choices[0].finish_reason for c in chunks[-2:]] == [None, "length"] and len(chunks) > 3
    assert all(c.usage is None for c in chunks) and not last.choices
    assert last.usage == whole.usage and last.usage.prompt_tokens == len(prompt.token_ids)


@pytest.mark.parametrize("chat", [False, True])
def test_every_chunk_counts_the_tokens_of_its_choice_if_it_is_to(client, chat):
    """vLLM's `continuous_usage_stats`, which load generators ask for."""
    create = client.chat.completions.create if chat else client.completions.create
    prompt = {"messages": CHAT} if chat else {"prompt": ["one", "the second"]}
    options = {"include_usage": True, "continuous_usage_stats": True}
    request = GREEDY | prompt | {"max_tokens": 6, "n": 2, "extra_body": {"return_token_ids": True}}
    *chunks, last = create(**request, stream=True, stream_options=options)
    written = collections.Counter()
    for chunk in chunks:
        (choice,) = chunk.choices
        written[choice.index] += len(getattr(choice, "token_ids", None) or ())
        assert chunk.usage.completion_tokens == written[choice.index]
        assert chunk.usage.total_tokens == chunk.usage.prompt_tokens + written[choice.index]
    prompts = {chunk.choices[0].index // 2: chunk.usage.prompt_tokens for chunk in chunks}
    assert sum(prompts.values()) == last.usage.prompt_tokens
    assert last.usage.completion_tokens == written.total() == 6 * len(written)


def test_prompts_in_every_shape(client, offline, byte_tokenizer):
    ids = [byte_tokenizer(text).input_ids for text in ("first", "second one")]
    texts = [output_of(offline, {"prompt_token_ids": tokens}).text for tokens in ids]
    for prompt, expected in (("first", texts[:1]), (ids[0], texts[:1]), (ids, texts)):
        request = GREEDY | {"prompt": prompt, "n": 2}
        answer = client.completions.create(**request)
        assert [c.index for c in answer.choices] == list(range(2 * len(expected)))
        assert [c.text for c in answer.choices] == [text for text in expected for _ in range(2)]
        assert answer.usage.prompt_tokens == sum(map(len, ids[: len(expected)]))
        assert answer.usage.completion_tokens == 32 * len(expected)
        pieces = [""] * len(answer.choices)
        for chunk in client.completions.create(**request, stream=True):
            pieces[chunk.choices[0].index] += chunk.choices[0].text
        assert pieces == [c.text for c in answer.choices]


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(client, offline, stream):
    """Those of the offline runtime, at offsets that count characters; a chat has the best first."""
    output = output_of(offline, "once", max_tokens=6, logprobs=2)
    request = GREEDY | {"prompt": "once", "max_tokens": 6, "logprobs": 2}
    request["stop"] = "never in it"  # for which a stream holds text back
    parts = client.completions.create(**request, stream=stream)
    choices = [choice for part in (parts if stream else [parts]) for choice in part.choices]
    joined = {
        name: [x for choice in choices for x in getattr(choice.logprobs, name)]
        for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs")
    }
    expected = [e[t].logprob for t, e in zip(output.token_ids, output.logprobs, strict=True)]
    assert joined["token_logprobs"] == pytest.approx(expected, abs=1e-5)
    assert len(joined["tokens"]) == 6 and joined["text_offset"][0] == 0
    ends = list(accumulate(map(len, joined["tokens"])))
    assert joined["text_offset"] == [0, *ends[:-1]]
    assert all(1 <= len(top) <= 3 for top in joined["top_logprobs"])
    # tokens that are parts of characters have the same text
    for token, logprob, top in zip(*map(joined.get, ("tokens", "token_logprobs", "top_logprobs"))):
        assert top[token] == logprob
    by_id = request | {"extra_body": {"return_tokens_as_token_ids": True}}
    logprobs = client.completions.create(**by_id).choices[0].logprobs
    assert logprobs.tokens == [f"token_id:{token}" for token in output.token_ids]
    for entries, names in zip(output.logprobs, logprobs.top_logprobs, strict=True):
        assert set(names) == {f"token_id:{token}" for token in entries}
    asked = {"max_tokens": 6, "logprobs": 2, "extra_body": {"detokenize": False}}
    (unwritten,) = client.completions.create(**GREEDY, prompt="once", **asked).choices
    assert (unwritten.text, unwritten.logprobs.tokens) == ("", joined["tokens"])
    chat = {"messages": CHAT, "max_tokens": 5, "logprobs": True, "top_logprobs": 3}
    for token in client.chat.completions.create(**GREEDY, **chat).choices[0].logprobs.content:
        best = [other.logprob for other in token.top_logprobs]
        assert len(best) == 3 and best == sorted(best, reverse=True)
        assert token.logprob == best[0]
        assert bytes(token.bytes).decode(errors="replace") == token.token


@pytest.mark.slow
@pytest.mark.parametrize(
    "extra",
    [
        {"top_k": 3, "min_p": 0.05, "repetition_penalty": 1.3, "seed": 5, "temperature": 0.9},
        {"logit_bias": {"120": 50}, "bad_words": ["xx"], "min_tokens": 8, "stop_token_ids": [101]},
    ],
)
def test_parameters_of_vllm(client, drafting_llm, model, extra):
    """As the offline runtime takes them, random numbers included."""
    params = {"temperature": 0, "max_tokens": 12} | extra
    answer = client.completions.create(model="tiny", prompt="parameters", extra_body=params)
    if "logit_bias" in params:
        params["logit_bias"] = {int(token): bias for token, bias in params["logit_bias"].items()}
    expected = output_of(drafting_llm("ngram", model), "parameters", **params).text
    assert answer.choices[0].text == expected


def test_stop_strings(client, offline, byte_tokenizer):
    letters = {"seed": 4, "allowed_token_ids": byte_tokenizer("abcdefgh").input_ids}
    whole = output_of(offline, "stop here", max_tokens=40, temperature=1.0, **letters).text
    stop = whole[20:23]
    request = dict(model="tiny", prompt="stop here", max_tokens=40, stop=[stop], extra_body=letters)
    choice = client.completions.create(**request).choices[0]
    assert (choice.text, choice.finish_reason) == (whole[: whole.find(stop)], "stop")
    assert choice.stop_reason == stop
    chunks = client.completions.create(**request, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == choice.text


def test_choices_are_in_the_order_of_their_prompts_whoever_ends_first(client, offline):
    prompts = ["first", "second one"]
    long, short = (output_of(offline, prompt) for prompt in prompts)
    stop = next(token for token in short.token_ids if token not in long.token_ids)
    request = GREEDY | {"prompt": prompts, "extra_body": {"stop_token_ids": [stop]}}
    first, second = client.completions.create(**request).choices
    assert (first.text, second.finish_reason) == (long.text, "stop")


def test_tools_and_options_reach_the_chat_template(serving, drafting_llm, model, byte_tokenizer):
    """A request's own before those of the server."""
    options = {"chat_template": TEMPLATE, "default_chat_template_kwargs": {"shout": True}}
    url = serving(drafting_llm("off", model), **options)
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    request = {"messages": CHAT[1:], "max_tokens": 1, "return_token_ids": True, "tools": [tool]}
    turns = "<s>user:Why is the sky blue?</s><s>assistant:"
    for extra, expected in (
        ({}, f"<tool>weather</tool>{turns}!"),
        ({"chat_template_kwargs": {"shout": False}, "tool_choice": "none"}, turns),
    ):
        answer = httpx2.post(f"{url}/v1/chat/completions", json=request | extra, timeout=60).json()
        assert byte_tokenizer.decode(answer["prompt_token_ids"]) == expected


PROMPT = "<b>again and <b>again and <b>again"
ACT = f"""at('chat').checked = false; at('max_tokens').value = 60; at('prompt').value = '{PROMPT}';
at('form').requestSubmit();
setInterval(() => running || fetch('v1/chat/completions', {{method: 'POST', body: JSON.stringify({{
  status: at('status').textContent, tau: at('tau').textContent,
  parts: [...at('output').children].map(e => ({{tag: e.tagName, text: e.textContent,
    position: e.dataset.position ?? null, colour: getComputedStyle(e).backgroundColor}}))
}})}}), 100);
"""


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no chromium or google-chrome on this machine")
def test_page_shows_what_became_of_each_draft(serving, drafting_llm, model, monkeypatch, tmp_path):
    """In a real browser, which acts and reports by a script: accepted drafts coloured by position,
    the target's own tokens plain, what was rejected struck through, and text never as markup."""
    reports: queue.Queue[dict] = queue.Queue()

    async def receive(self, http):
        reports.put(json.loads(await http.body()))
        return app.Response()

    monkeypatch.setattr(app.Server, "chat_completions", receive)
    page = tmp_path / "page.html"
    page.write_text(app.PAGE.read_text().replace("</script>", f"{ACT}</script>"))
    monkeypatch.setattr(app, "PAGE", page)
    llm = drafting_llm("ngram", model)
    url = serving(llm)
    flags = ("--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'x'}")
    browser = subprocess.Popen([BROWSER, *flags, f"{url}/"], stderr=subprocess.DEVNULL)
    try:
        shown = reports.get(timeout=60)
    finally:
        browser.kill()
        browser.wait()
    assert shown["status"] == "finished: length" and {p["tag"] for p in shown["parts"]} == {
        "SPAN",
        "DEL",
    }
    counters, kept = llm.get_metrics(), [p for p in shown["parts"] if p["tag"] == "SPAN"]
    accepted = [part for part in kept if part["position"] is not None]
    assert (len(kept), len(accepted)) == (60, counters.num_accepted_tokens)
    colours = {(part["position"], part["colour"]) for part in kept}
    assert len(colours) == len(dict(colours)) == len({colour for _, colour in colours}) > 2
    assert len(shown["parts"]) - 60 == counters.num_draft_tokens - counters.num_accepted_tokens
    assert shown["tau"] == f"{counters.acceptance_length:.2f}"
    request = GREEDY | {"prompt": PROMPT, "max_tokens": 60}
    answer = httpx2.post(f"{url}/v1/completions", json=request, timeout=60).json()
    assert "".join(part["text"] for part in kept) == answer["choices"][0]["text"]


@pytest.mark.parametrize("stream", [False, True])
def test_acceptance_of_each_response(url, client, serving, stream):
    """In vLLM's fields, when asked for, with drafting off and on beside each other: the same text,
    and each response's own acceptance. None for several responses, whose rounds nobody could tell
    apart."""
    request = GREEDY | {"prompt": "abababababab", "max_tokens": 40, "stream": stream}
    detailed = {"per_request_spec_decode_metrics": "detailed", "allowed_token_ids": [97, 98]}

    def ask(extra, **more):
        answer = client.completions.create(**request, **more, extra_body=extra)
        parts = list(answer) if stream else [answer]
        text = "".join(choice.text for part in parts for choice in part.choices)
        return text, (getattr(parts[-1], "metrics", None) or {}).get("speculative_decoding")

    before, limits = serving.server(url).llm.get_metrics().num_drafts, (None, 0, 1, 9)
    with ThreadPoolExecutor() as pool:
        requests = [detailed | {"num_speculative_tokens": most} for most in limits]
        answers = dict(zip(limits, pool.map(ask, requests), strict=True))
    assert len({text for text, _ in answers.values()}) == 1
    for most, (_, acceptance) in answers.items():
        longest = 3 if most in (None, 9) else most
        histogram, accepted = acceptance["acceptance_histogram"], acceptance["per_step_accepted"]
        assert acceptance["num_spec_tokens"] == longest == len(histogram) - 1
        assert max(acceptance["per_step_drafted"], default=0) == longest
        assert sum(histogram) == acceptance["num_spec_steps"] == len(accepted)
        counted = sum(j * count for j, count in enumerate(histogram))
        assert counted == acceptance["num_accepted_draft_tokens"] == sum(accepted)
        assert sum(acceptance["per_step_drafted"]) == acceptance["num_draft_tokens"]
        length = acceptance_length(counted, acceptance["num_spec_steps"])
        assert acceptance["mean_acceptance_length"] == pytest.approx(length)
    drafts = sum(acceptance["num_spec_steps"] for _, acceptance in answers.values())
    assert serving.server(url).llm.get_metrics().num_drafts - before == drafts > 0
    summary = ask(detailed | {"per_request_spec_decode_metrics": "summary"})[1]
    assert summary["per_step_accepted"] is None
    assert ask({})[1] is None and ask(detailed, n=2)[1] is None


def test_metrics_agree_with_what_clients_got(url, client, serving):
    usages = [
        client.completions.create(**GREEDY, prompt="m" * length, max_tokens=20, n=n).usage
        for length, n in ((5, 1), (9, 2), (30, 1))
    ]
    text = httpx2.get(f"{url}/metrics").text
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    values = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}

    def value(name: str, **more: str) -> float:
        labels = {"engine": "0", "model_name": "tiny"} | more
        text = ",".join(f'{label}="{labels[label]}"' for label in sorted(labels))
        return values[f"vllm:{name}{{{text}}}"]

    assert value("generation_tokens_total") == sum(u.completion_tokens for u in usages) == 80
    assert value("prompt_tokens_total") == 5 + 2 * 9 + 30  # a prompt is read once per response
    assert value("request_success_total", finished_reason="length") == 4
    assert value("request_success_total", finished_reason="stop") == 0
    assert value("num_requests_running") == value("num_requests_waiting") == 0
    counters = serving.server(url).llm.get_metrics()
    for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
        assert value(f"spec_decode_{name}_total") == getattr(counters, name) > 0
    name = "spec_decode_num_accepted_tokens_per_pos_total"
    places = [value(name, position=str(position)) for position in range(3)]
    assert sum(places) == counters.num_accepted_tokens and places == sorted(places, reverse=True)
