"""Rounds in a stream: what they say is what was written, what was counted, and what nobody else
notices."""

from __future__ import annotations

import json

import httpx2
import pytest

CLIENT = httpx2.Client(timeout=60)
REQUEST = {"prompt": "again and again and again", "max_tokens": 60, "temperature": 0}
REQUEST["return_token_ids"] = True


def choices(url: str, request: dict, path: str = "/v1/completions") -> list[dict]:
    request = {"return_rounds": True, **request, "stream": True}
    with CLIENT.stream("POST", url + path, json=request) as answer:
        assert answer.status_code == 200
        *lines, last = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert last == "[DONE]"
    chunks = [json.loads(line) for line in lines]
    return [choice | {"more": chunk} for chunk in chunks for choice in chunk["choices"] or [{}]]


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, temperature", [("off", 0), ("ngram", 0), ("fake", 0.9), ("dynamic", 0.9), ("static", 0)]
)
def test_rounds_are_what_was_written_and_counted(kind, temperature, serving, drafting_llm, model):
    """Their tokens are the response's, their texts its text, and their totals those of its
    metrics."""
    sampling = {"temperature": temperature, "seed": 3, "stop_token_ids": [7, 9]}
    request = REQUEST | sampling | {"per_request_spec_decode_metrics": "detailed"}
    *parts, last = choices(serving(drafting_llm(kind, model)), request)
    if kind == "off":  # nothing is counted at the end
        parts.append(last)
    rounds = [judged for choice in parts for judged in choice["rounds"]]
    tokens = [token for judged in rounds for token in judged["tokens"]]
    assert [t["token_id"] for t in tokens] == [t for part in parts for t in part["token_ids"]]
    written = "".join(token["text"] for token in tokens)
    assert parts[-1]["finish_reason"] == "stop" or written == "".join(p["text"] for p in parts)
    for judged in rounds:
        positions = [token["position"] for token in judged["tokens"]]
        bonus = positions.count(None)
        assert bonus <= 1 and positions == [
            *range(len(positions) - bonus),
            *[None] * bonus,
        ]
    drafted = [judged for judged in rounds if judged["num_draft_tokens"]]
    if kind == "off":
        assert not drafted and all(len(judged["tokens"]) == 1 for judged in rounds)
        return
    metrics = last["more"]["metrics"]["speculative_decoding"]
    accepted = [sum(t["position"] is not None for t in judged["tokens"]) for judged in drafted]
    assert accepted == metrics["per_step_accepted"]
    assert metrics["num_spec_steps"] == len(drafted) > 3
    assert [judged["num_draft_tokens"] for judged in drafted] == metrics["per_step_drafted"]
    assert any(judged["rejected"] for judged in rounds)


def test_texts_of_rounds_are_those_of_the_answers(serving, drafting_llm, model, byte_tokenizer):
    """Of each of several responses, of a chat, with special tokens, and where every byte of a
    character is a token: its text comes with the one that completes it."""
    url = serving(drafting_llm("ngram", model))
    allowed = [*byte_tokenizer("ä").input_ids, byte_tokenizer.eos_token_id]
    letters = {"allowed_token_ids": allowed, "temperature": 1, "seed": 5}
    letters |= {"skip_special_tokens": False, "ignore_eos": True, "max_tokens": 200}
    several = {"prompt": ["first", "second"], "n": 2, "temperature": 1, "seed": 1, "max_tokens": 20}
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 12, "temperature": 0}
    for request, path in ((REQUEST | letters, "completions"), (several, "completions")):
        answers, rounds, pieces = {}, {}, set()
        for choice in choices(url, request, f"/v1/{path}"):
            texts = [token["text"] for judged in choice["rounds"] for token in judged["tokens"]]
            index = choice["index"]
            answers[index] = answers.get(index, "") + choice["text"]
            rounds[index] = rounds.get(index, "") + "".join(texts)
            pieces |= set(texts)
        assert answers == rounds and len(set(answers.values())) == len(answers)
        assert request is several or {"", "ä", "</s>"} <= pieces
    parts = choices(url, chat, "/v1/chat/completions")
    texts = [t["text"] for c in parts for r in c.get("rounds", ()) for t in r["tokens"]]
    assert "".join(texts) == "".join(c["delta"].get("content") or "" for c in parts) != ""


def test_nobody_gets_them_unasked(serving, drafting_llm, model):
    """An answer is the same with them and without."""
    url = serving(drafting_llm("ngram", model))
    with_rounds, without = (choices(url, REQUEST | {"return_rounds": on}) for on in (True, False))
    assert all("rounds" not in choice for choice in without)
    for choice in (*with_rounds, *without):
        choice.pop("rounds", None), choice.pop("more")
    assert with_rounds == without
    answer = CLIENT.post(f"{url}/v1/completions", json=REQUEST | {"return_rounds": True})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "return_rounds"
