"""Sampling parameters met with a tokenizer and a vocabulary: words to tokens, and what cannot be
honoured for this model. Knows no requests and no logits."""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache
from typing import Any

from draftsmith.inference.sampling.logits_processors import bad_word_ids
from draftsmith.inference.sampling_params import SamplingParams


class RequestSampling:
    """For all requests of one LLM."""

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._eos_token_ids = frozenset(eos_token_ids)
        self._bad_words = lru_cache(maxsize=64)(lambda words: bad_word_ids(tokenizer, words))

    def options(self, params: SamplingParams) -> dict[str, Any]:
        """The fields that a Request takes."""
        options: dict[str, Any] = {}
        if params.bad_words:
            options["bad_words"] = self._bad_words(params.bad_words)
        return options

    def faults(self, params: SamplingParams) -> list[str]:
        """The settings that cannot be honoured, as a sentence."""
        faults = []
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            if beyond := [
                token for token in getattr(params, name) or () if token >= self._vocab_size
            ]:
                faults.append(f"{name} {beyond} go beyond 0..{self._vocab_size - 1}")
        if (params.logprobs or 0) > self._vocab_size:
            faults.append(
                f"logprobs={params.logprobs}, but the vocabulary has {self._vocab_size} tokens; -1"
                " is all of them"
            )
        if params.stop and self._tokenizer is None:
            faults.append("asks for stop strings, which need a tokenizer; pass LLM(tokenizer=...)")
        if params.bad_words and self._tokenizer is None:
            faults.append("bad_words need a tokenizer; pass LLM(tokenizer=...), or use logit_bias")
        elif params.bad_words:
            beyond = [
                ids for ids in self._bad_words(params.bad_words) if max(ids) >= self._vocab_size
            ]
            if beyond:
                faults.append(
                    f"bad_words are written with token ids {beyond}, beyond"
                    f" 0..{self._vocab_size - 1}"
                )
        if self._may_forbid_all(params):
            faults.append(
                "allowed_token_ids, bad_words and min_tokens may leave no token at some place;"
                " allow one that no bad word ends with"
            )
        return faults

    def _may_forbid_all(self, params: SamplingParams) -> bool:
        """Whether every token is not allowed, the last of a bad word, or a stop that comes too
        early."""
        forbidden: set[int] = set()
        if params.bad_words and self._tokenizer is not None:
            forbidden |= {ids[-1] for ids in self._bad_words(params.bad_words)}
        if params.min_tokens:
            forbidden |= {
                *(params.stop_token_ids or ()),
                *(() if params.ignore_eos else self._eos_token_ids),
            }
        if params.allowed_token_ids is not None:
            return forbidden.issuperset(params.allowed_token_ids)
        return len(forbidden) >= self._vocab_size
