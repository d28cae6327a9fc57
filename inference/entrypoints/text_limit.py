"""The longest text that a context can hold, known without tokenizing any."""

from __future__ import annotations

import json
import math
from typing import Any

from tokenizers.pre_tokenizers import ByteLevel

from draftsmith.speculators.errors import ConfigError

# Steps of a tokenizer -> the most characters of a text that one of their output can stand for. NFC
# and NFKC compose: no character of Unicode decomposes canonically into more than four.
NORMALIZERS = {"ByteLevel": 1, "NFC": 4, "NFD": 1, "NFKC": 4, "NFKD": 1, "Prepend": 1, "Replace": 1}
PRE_TOKENIZERS = {"ByteLevel", "Digits", "Metaspace", "Punctuation", "Split", "UnicodeScripts"}


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
