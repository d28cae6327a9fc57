"""What answers say of tokens: of parts of characters, and of those that cannot be."""

from __future__ import annotations

import json
import math

from draftsmith.inference.outputs import Logprob
from draftsmith.inference.server.answers import _bytes_of, _finite


def test_bytes_are_those_that_a_token_adds(byte_tokenizer):
    ids = byte_tokenizer("é").input_ids[-2:]
    texts = [byte_tokenizer.decode([token]) for token in ids]
    assert texts == ["\ufffd"] * 2
    parts = [_bytes_of(byte_tokenizer, token, text) for token, text in zip(ids, texts, strict=True)]
    assert parts == [b"\xc3", b"\xa9"]


def test_bytes_are_those_of_the_text_where_a_tokenizer_does_not_tell_them():
    assert _bytes_of(object(), 7, "word") == b"word"
    assert _bytes_of(object(), 7, "\ufffd") is None


def test_logprob_of_a_token_that_cannot_be_is_a_number_that_json_has():
    assert json.dumps(_finite(Logprob(-math.inf)), allow_nan=False) == "-9999.0"
