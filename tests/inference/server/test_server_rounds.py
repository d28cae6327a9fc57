"""Rounds in a stream: what they say is what was written, what was counted, and what nobody else
notices."""

from __future__ import annotations

import json

import httpx2
import pytest

from inference import SamplingParams

CLIENT = httpx2.Client(timeout=60)


@pytest.fixture(scope="module")
def model(tiny_model, byte_tokenizer):
    model = tiny_model("qwen3", vocab_size=len(byte_tokenizer), max_position_embeddings=256)
    model.generation_config.eos_token_id = None
    return model


def events(url: str, request: dict, path: str = "/v1/completions") -> list[dict]:
    with CLIENT.stream("POST", url + path, json=request | {"stream": True}) as answer:
        assert answer.status_code == 200
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


ASKED = {
    "prompt": "again and again and again",
    "max_tokens": 60,
    "temperature": 0,
    "return_token_ids": True,
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["off", "ngram", "fake", "dynamic", "static"])
@pytest.mark.parametrize("temperature", [0, 0.9])
def test_rounds_are_what_was_written_and_counted(kind, temperature, serving, drafting_llm, model):
    """Their tokens are the response's, their texts its text, and their totals those of its
    metrics."""
    url = serving(drafting_llm(kind, model))
    asked = ASKED | {
        "temperature": temperature,
        "seed": 3,
        "stop_token_ids": [7, 9],
        "return_rounds": True,
    }
    chunks = events(url, asked | {"per_request_spec_decode_metrics": "detailed"})
    choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    rounds = [each for choice in choices for each in choice["rounds"]]
    tokens = [token for each in rounds for token in each["tokens"]]
    assert [token["token_id"] for token in tokens] == [
        t for choice in choices for t in choice["token_ids"]
    ]
    written = "".join(token["text"] for token in tokens)
    assert (
        written == "".join(choice["text"] for choice in choices)
        or choices[-1]["finish_reason"] == "stop"
    )
    for each in rounds:
        positions = [token["position"] for token in each["tokens"]]
        own = positions.count(None)
        assert own <= 1 and positions == [*range(len(positions) - own), *[None] * own]
        assert (
            len(each["tokens"]) - own + len(each["rejected"]) <= each["num_draft_tokens"] or not own
        )
    if kind == "off":
        assert all(each["num_draft_tokens"] == 0 and len(each["tokens"]) == 1 for each in rounds)
        return
    counted = chunks[-1]["metrics"]["speculative_decoding"]
    drafted = [each for each in rounds if each["num_draft_tokens"]]
    accepted = [sum(token["position"] is not None for token in each["tokens"]) for each in drafted]
    assert (
        accepted == counted["per_step_accepted"] and counted["num_spec_steps"] == len(drafted) > 3
    )
    assert [each["num_draft_tokens"] for each in drafted] == counted["per_step_drafted"]
    assert any(each["rejected"] for each in rounds)


def test_what_is_rejected_and_what_is_accepted(serving, drafting_llm, model, byte_tokenizer):
    """A drafter that is always right has nothing rejected, one that is always wrong nothing
    accepted."""
    prompt = byte_tokenizer("once more").input_ids
    params = SamplingParams(temperature=0, max_tokens=24)
    (output,) = drafting_llm("off", model).generate({"prompt_token_ids": prompt}, params, False)
    texts = {tuple(prompt): output.outputs[0].token_ids}
    asked = {"prompt": prompt, "temperature": 0, "max_tokens": 16, "return_rounds": True}
    for kind in ("right", "wrong"):
        url = serving(drafting_llm(kind, model, texts))
        rounds = [r for chunk in events(url, asked) for r in chunk["choices"][0]["rounds"]]
        drafted = [each for each in rounds if each["num_draft_tokens"]]
        if kind == "right":
            assert not any(each["rejected"] for each in drafted[:-1]) and len(rounds) <= 6
        else:
            assert all(len(each["tokens"]) == 1 for each in rounds) and len(rounds) == 16
            assert all(
                [t["position"] for t in r["rejected"]] == [*range(r["num_draft_tokens"])]
                for r in drafted
            )


def test_characters_of_several_tokens_are_told_whole(serving, drafting_llm, model, byte_tokenizer):
    """Every byte of a character is a token here: its text comes with the one that completes it."""
    url = serving(drafting_llm("ngram", model))
    letters = byte_tokenizer("ä").input_ids
    only = {"allowed_token_ids": letters, "temperature": 1, "seed": 5}
    chunks = events(url, ASKED | only | {"return_rounds": True})
    texts = [t["text"] for c in chunks for r in c["choices"][0]["rounds"] for t in r["tokens"]]
    assert "".join(texts) == "".join(c["choices"][0]["text"] for c in chunks)
    assert {"", "ä"} <= set(texts)


def test_several_responses_and_chats_have_their_own(serving, drafting_llm, model):
    url = serving(drafting_llm("ngram", model))
    several = {"prompt": ["first", "second"], "n": 2, "temperature": 1, "seed": 1, "max_tokens": 20}
    texts, told = [""] * 4, [""] * 4
    for chunk in events(url, several | {"return_rounds": True}):
        choice = chunk["choices"][0]
        texts[choice["index"]] += choice["text"]
        told[choice["index"]] += "".join(t["text"] for r in choice["rounds"] for t in r["tokens"])
    assert texts == told and len(set(texts)) == 4
    chat = {
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 12,
        "temperature": 0,
        "return_rounds": True,
    }
    choices = [chunk["choices"][0] for chunk in events(url, chat, "/v1/chat/completions")]
    told = "".join(t["text"] for c in choices for r in c.get("rounds", ()) for t in r["tokens"])
    assert told == "".join(c["delta"].get("content") or "" for c in choices) and len(told) > 3


def test_nobody_gets_them_unasked(serving, drafting_llm, model):
    """An answer is the same with them and without, and only what asked is listened to."""
    url = serving(drafting_llm("ngram", model))
    with_rounds, without = (events(url, ASKED | asked) for asked in ({"return_rounds": True}, {}))
    assert all("rounds" not in chunk["choices"][0] for chunk in without)
    told, untold = (
        [each["choices"][0] | {"rounds": 0} for each in chunks] for chunks in (with_rounds, without)
    )
    assert told == untold
    assert serving.server(url).engine._tracer.watched == 0
    answer = CLIENT.post(f"{url}/v1/completions", json=ASKED | {"return_rounds": True})
    assert answer.status_code == 400 and "stream" in answer.json()["error"]["message"]
