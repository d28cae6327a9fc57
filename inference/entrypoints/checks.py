"""What a model cannot do of what a request asks for. Knows no engine and no logits."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from draftsmith.inference.entrypoints.prompts import Prompt
from draftsmith.inference.sampling_params import SamplingParams


@dataclass(frozen=True)
class CheckedRequest:
    """A prompt that the model can run with these parameters. `bad_words`: theirs, as tokens."""

    prompt: Prompt
    params: SamplingParams
    bad_words: Sequence[Sequence[int]]


def prompt_faults(prompt: Prompt, vocab_size: int, max_model_len: int) -> list[str]:
    """What is wrong with a prompt, as the rest of a sentence."""
    length = len(prompt.token_ids)
    if length == 0:
        return ["is empty; give it at least one token"]
    if length >= max_model_len:
        return [
            f"has {length} tokens, max_model_len is {max_model_len} and at least one must be left"
            " for the response; shorten it or raise max_model_len"
        ]
    if not 0 <= min(prompt.token_ids) <= max(prompt.token_ids) < vocab_size:
        return [f"has token ids outside 0..{vocab_size - 1}; is the tokenizer the model's?"]
    return []


def sampling_faults(
    params: SamplingParams,
    bad_words: Sequence[Sequence[int]],
    tokenizer: Any,
    vocab_size: int,
    eos_token_ids: Collection[int],
) -> dict[str, str]:
    """The sampling parameters that cannot be honoured, each with the rest of a sentence.
    `bad_words`: theirs, as tokens."""
    if tokenizer is None and (params.stop or params.bad_words):
        name = "stop" if params.stop else "bad_words"
        return {name: f"asks for {name}, which need a tokenizer; pass LLM(tokenizer=...)"}
    token_ids = {
        "stop_token_ids": params.stop_token_ids,
        "allowed_token_ids": params.allowed_token_ids or (),
        "logit_bias": params.logit_bias or (),
        "bad_words": [token for ids in bad_words for token in ids],
    }
    faults = {}
    for name, ids in token_ids.items():
        if beyond := [token for token in ids if token >= vocab_size]:
            faults[name] = f"{name}: token ids {beyond[:3]} go beyond 0..{vocab_size - 1}"
    if (params.logprobs or 0) > vocab_size:
        faults["logprobs"] = (
            f"logprobs={params.logprobs}, but the vocabulary has {vocab_size} tokens; -1 is all of"
            " them"
        )
    forbidden = {ids[-1] for ids in bad_words}
    if params.min_tokens:
        forbidden.update(params.stop_token_ids, () if params.ignore_eos else eos_token_ids)
    allowed = range(vocab_size) if params.allowed_token_ids is None else params.allowed_token_ids
    if forbidden.issuperset(allowed):
        faults.setdefault(
            "allowed_token_ids",
            "allowed_token_ids, bad_words and min_tokens may leave no token at some place; allow"
            " one that no bad word ends with",
        )
    return faults
