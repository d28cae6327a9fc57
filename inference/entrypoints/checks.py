"""What a model cannot do of what a request asks for: prompts that do not fit, parameters that
cannot be honoured, and texts that are known to be too long before they are tokenized. Knows no
engine and no logits."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tokenizers.pre_tokenizers import ByteLevel

from draftsmith.inference.entrypoints.prompts import Prompt
from draftsmith.inference.sampling.logits_processors import bad_word_ids
from draftsmith.inference.sampling_params import SamplingParams
from draftsmith.speculators.errors import ConfigError

# Steps of a tokenizer -> the most characters of a text that one of their output can stand for. NFC
# and NFKC compose: no character of Unicode decomposes canonically into more than four.
NORMALIZERS = {"ByteLevel": 1, "NFC": 4, "NFD": 1, "NFKC": 4, "NFKD": 1, "Prepend": 1, "Replace": 1}
PRE_TOKENIZERS = {"ByteLevel", "Digits", "Metaspace", "Punctuation", "Split", "UnicodeScripts"}


@dataclass(frozen=True)
class CheckedRequest:
    """A prompt that the model can run with these parameters. `bad_words`: theirs, as tokens."""

    prompt: Prompt
    params: SamplingParams
    bad_words: Sequence[Sequence[int]]


class RequestChecker:
    """Checks the requests of one model. `tokenizer`: None where prompts are token ids.
    `max_model_len`: most tokens of a prompt and its response. `eos_token_ids`: end a response."""

    def __init__(
        self,
        tokenizer: Any,
        vocab_size: int,
        max_model_len: int,
        eos_token_ids: Collection[int],
    ) -> None:
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.eos_token_ids = frozenset(eos_token_ids)
        self._tokenizer = tokenizer

    def check(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]
    ) -> list[CheckedRequest]:
        """The prompts with their parameters. ConfigError names every prompt that cannot be run; its
        `where` is "prompts", or the parameter that is at fault first. Changes nothing: callable
        from any thread."""
        read: dict[int, _ReadParams] = {}  # by identity: many prompts may share their parameters
        checked: list[CheckedRequest] = []
        faults: list[tuple[str, str]] = []  # what is at fault, and a sentence on it
        for i, (prompt, asked) in enumerate(zip(prompts, params, strict=True)):
            if id(asked) not in read:
                read[id(asked)] = self._read(asked)
            bad_words, params_faults = read[id(asked)]
            if fault := self._prompt_fault(prompt):
                faults.append(("prompts", f"prompt {i} {fault}"))
            for name, fault in params_faults.items():
                faults.append((f"SamplingParams.{name}", f"prompt {i} {fault}"))
            checked.append(CheckedRequest(prompt, asked, bad_words))
        if faults:
            raise ConfigError("; ".join(fault for _, fault in faults), where=faults[0][0])
        return checked

    def _prompt_fault(self, prompt: Prompt) -> str:
        """What is wrong with a prompt, as the rest of a sentence; empty if nothing is."""
        length = len(prompt.token_ids)
        if length == 0:
            return "is empty; give it at least one token"
        if length >= self.max_model_len:
            return (
                f"has {length} tokens, max_model_len is {self.max_model_len} and at least one must"
                " be left for the response; shorten it or raise max_model_len"
            )
        if not 0 <= min(prompt.token_ids) <= max(prompt.token_ids) < self.vocab_size:
            last = self.vocab_size - 1
            return f"has token ids outside 0..{last}; is the tokenizer the model's?"
        return ""

    def _read(self, params: SamplingParams) -> _ReadParams:
        if self._tokenizer is None and (params.stop or params.bad_words):
            name = "stop" if params.stop else "bad_words"
            fault = f"asks for {name}, which need a tokenizer; pass LLM(tokenizer=...)"
            return _ReadParams([], {name: fault})
        bad_words = bad_word_ids(self._tokenizer, params.bad_words)
        faults = self._tokens_beyond_the_vocabulary(params, bad_words)
        if (params.logprobs or 0) > self.vocab_size:
            faults["logprobs"] = (
                f"logprobs={params.logprobs}, but the vocabulary has {self.vocab_size} tokens; -1"
                " is all of them"
            )
        if self._may_allow_no_token(params, bad_words):
            faults.setdefault(
                "allowed_token_ids",
                "allowed_token_ids, bad_words and min_tokens may leave no token at some place;"
                " allow one that no bad word ends with",
            )
        return _ReadParams(bad_words, faults)

    def _tokens_beyond_the_vocabulary(
        self, params: SamplingParams, bad_words: Sequence[Sequence[int]]
    ) -> dict[str, str]:
        token_ids = {
            "stop_token_ids": params.stop_token_ids,
            "allowed_token_ids": params.allowed_token_ids or (),
            "logit_bias": params.logit_bias or (),
            "bad_words": [token for ids in bad_words for token in ids],
        }
        faults = {}
        for name, ids in token_ids.items():
            if beyond := [token for token in ids if token >= self.vocab_size]:
                faults[name] = f"{name}: token ids {beyond[:3]} go beyond 0..{self.vocab_size - 1}"
        return faults

    def _may_allow_no_token(
        self, params: SamplingParams, bad_words: Sequence[Sequence[int]]
    ) -> bool:
        """True if every token that is allowed could be forbidden at the same place."""
        forbidden = {ids[-1] for ids in bad_words}
        if params.min_tokens:
            forbidden.update(params.stop_token_ids)
            if not params.ignore_eos:
                forbidden.update(self.eos_token_ids)
        allowed = params.allowed_token_ids
        return forbidden.issuperset(range(self.vocab_size) if allowed is None else allowed)


class _ReadParams(NamedTuple):
    """What parameters ask of a model: their bad words as tokens, and what cannot be honoured, by
    parameter, as the rest of a sentence."""

    bad_words: Sequence[Sequence[int]]
    faults: dict[str, str]


class TextLimit:
    """Texts that must have more tokens than `max_model_len` leaves room for are refused.

    A text of C characters has at least C / L tokens, where L characters are the most that one token
    stands for. Tokens of bytes (GPT-2's alphabet or a fallback to them) spell every character, and
    so L is the length of the vocabulary's longest string, times what normalization composes: a
    string of that alphabet has a character for each byte, and a text no more characters than bytes.
    Tokenizers that can drop or fuse characters, and those without a fast backend, set no limit."""

    def __init__(self, tokenizer: Any, max_model_len: int) -> None:
        self._max_model_len = max_model_len
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._characters = None if backend is None else most_characters(backend)
        added = {} if backend is None else backend.get_added_tokens_decoder()
        # added tokens may swallow the blanks beside them, however many
        self._swallows = any(token.lstrip or token.rstrip for token in added.values())

    def check(self, text: str) -> None:
        """ConfigError for a text that is too long for the context."""
        if self._characters is None:
            return
        length = len("".join(text.split())) if self._swallows else len(text)
        fewest = math.ceil(length / self._characters)
        if fewest >= self._max_model_len:
            raise ConfigError(
                f"a text of {len(text):,} characters has {fewest:,} tokens or more; max_model_len"
                f" is {self._max_model_len}, and at least one must be left for the response",
                where="prompts",
            )


def most_characters(backend: Any) -> int | None:
    """The most characters of a text that one token of a `tokenizers.Tokenizer` can stand for; None:
    there is no such number."""
    normalizers = _steps(backend.normalizer)
    pre_tokenizers = _steps(backend.pre_tokenizer)
    vocabulary = backend.get_vocab()
    if getattr(backend.model, "byte_fallback", False):
        alphabet = [f"<0x{byte:02X}>" for byte in range(256)]
    elif any(step["type"] == "ByteLevel" for step in normalizers + pre_tokenizers):
        alphabet = ByteLevel.alphabet()
    else:
        return None
    if not vocabulary.keys() >= set(alphabet):
        return None
    if not all(_keeps_text(step) for step in normalizers):
        return None
    if any(
        step["type"] not in PRE_TOKENIZERS or step.get("behavior") == "Removed"
        for step in pre_tokenizers
    ):
        return None
    composed = math.prod(NORMALIZERS[step["type"]] for step in normalizers)
    return composed * max(map(len, vocabulary))


def _keeps_text(normalizer: dict[str, Any]) -> bool:
    if normalizer["type"] != "Replace":
        return normalizer["type"] in NORMALIZERS
    pattern = normalizer["pattern"].get("String")
    return pattern is not None and len(normalizer["content"]) >= len(pattern)


def _steps(stage: Any) -> list[dict[str, Any]]:
    """The steps of a normalizer or pre-tokenizer, in their JSON form."""
    if stage is None:
        return []
    fields = json.loads(stage.__getstate__())
    nested = fields.get("normalizers") or fields.get("pretokenizers")
    return [fields] if nested is None else list(nested)
