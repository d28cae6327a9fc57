"""Texts are refused by their length alone only where they could not have fitted."""

from __future__ import annotations

import unicodedata

import pytest
from tokenizers import AddedToken, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from draftsmith.inference.entrypoints.checks import TextLimit, most_characters
from draftsmith.speculators.errors import ConfigError
from tests.support.errors import raises_at
from tests.support.tokenizers import CORPUS, byte_level, byte_tokenizer, sentencepiece


def composing() -> PreTrainedTokenizerFast:
    tokenizer = byte_level()
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def swallowing() -> PreTrainedTokenizerFast:
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken("<mark>", rstrip=True, normalized=False)])
    return tokenizer


TEXTS = [
    *CORPUS,
    " " * 3000,
    "the " * 700,
    "<|end|>" * 300,
    f"<mark>{' ' * 3000}",
    "\U0001f642" * 500,
    unicodedata.normalize("NFD", "ᾂ") * 500,
]


@pytest.mark.parametrize("make", [byte_tokenizer, byte_level, composing, swallowing, sentencepiece])
def test_text_limit_what_would_fit_is_never_refused(make):
    """The least context that holds a text with a place for one more token."""
    tokenizer = make()
    for text in TEXTS:
        TextLimit(tokenizer, len(tokenizer(text).input_ids) + 1).check(text)


@pytest.mark.parametrize("make", [byte_tokenizer, byte_level, composing, swallowing, sentencepiece])
def test_text_limit_a_text_far_beyond_the_context_is_refused(make):
    with raises_at(ConfigError, "prompts"):
        TextLimit(make(), 50).check("x" * 50_000)


def removing() -> PreTrainedTokenizerFast:
    tokenizer = byte_level()
    split = pre_tokenizers.Split(" ", "removed")
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return tokenizer


def stripping() -> PreTrainedTokenizerFast:
    tokenizer = byte_level()
    tokenizer.backend_tokenizer.normalizer = normalizers.Strip()
    return tokenizer


@pytest.mark.parametrize(
    "tokenizer",
    [removing(), stripping(), sentencepiece("bpe", False), sentencepiece("unigram", False)],
)
def test_text_limit_tokenizers_that_drop_characters_set_none(tokenizer):
    assert most_characters(tokenizer.backend_tokenizer) is None
    TextLimit(tokenizer, 2).check(" " * 50_000)


def test_text_limit_tokenizer_without_a_backend_sets_none():
    TextLimit(object(), 2).check("x" * 50_000)
