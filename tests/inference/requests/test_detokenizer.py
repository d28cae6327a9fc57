"""Text is a function of the tokens alone: however they come in blocks, texts, stops and cuts are
the same."""

from __future__ import annotations

import random

import pytest

from draftsmith.inference.requests.detokenizer import Detokenizer
from draftsmith.inference.requests.request import Request
from draftsmith.inference.sampling_params import SamplingParams
from tests.support.tokenizers import byte_level, sentencepiece

TEXT = "naïve 🦜 “quoted” text, 日本語 END of it"


def full_text(tokenizer, ids, params):
    return pushed(tokenizer, [], [ids], params)[2]


def pushed(tokenizer, prompt, blocks, params):
    """(kept tokens, stop string, text, the pieces that were taken) of blocks pushed one after
    another."""
    detokenizer, kept, pieces = Detokenizer(tokenizer, prompt, params), 0, []
    for block in blocks:
        used, stop = detokenizer.push(block)
        kept += used
        pieces.append(detokenizer.take())
        if stop is not None:
            break
    detokenizer.finish()
    return kept, stop, detokenizer.text, [*pieces, detokenizer.take()]


def splits(ids, seed, repeats=12):
    """The tokens one by one, all at once, and in random blocks."""
    yield [[token] for token in ids]
    yield [list(ids)]
    source = random.Random(seed)
    for _ in range(repeats):
        blocks, at = [], 0
        while at < len(ids):
            size = source.randint(1, 6)
            blocks.append(ids[at : at + size])
            at += size
        yield blocks


def test_text_does_not_depend_on_blocks(byte_tokenizer):
    ids = byte_tokenizer(TEXT).input_ids
    for blocks in splits(ids, 0):
        kept, stop, text, pieces = pushed(byte_tokenizer, [5, 6], blocks, SamplingParams())
        assert (kept, stop, text) == (len(ids), None, TEXT) and "".join(pieces) == TEXT
        assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize(
    "prompt", ["", "a", "é", "a日", "aé😀", "a😀😀", "日😀", "日😀日", "😀😀😀😀"]
)
@pytest.mark.parametrize("make", [sentencepiece, byte_level])
def test_text_does_not_depend_on_where_characters_of_the_prompt_begin(make, prompt):
    """Characters that are several tokens, of a byte each."""
    tokenizer = make()
    prompt_ids, ids = (tokenizer(text).input_ids for text in (prompt, f"{prompt}😁日 a"))
    assert ids[: len(prompt_ids)] == prompt_ids
    for blocks in splits(ids[len(prompt_ids) :], 4):
        pieces = pushed(tokenizer, prompt_ids, blocks, SamplingParams())[3]
        assert "".join(pieces) == "😁日 a"
        assert not any("\ufffd" in piece for piece in pieces)


def test_invalid_bytes_are_shown_once_it_is_known_that_they_are(byte_tokenizer):
    source = random.Random(1)
    for seed in range(20):
        ids = [source.randrange(256) for _ in range(25)]
        expected = full_text(byte_tokenizer, ids, SamplingParams())
        assert expected == byte_tokenizer.decode(ids)
        for blocks in splits(ids, seed, 4):
            _, _, text, pieces = pushed(byte_tokenizer, [], blocks, SamplingParams())
            assert text == expected == "".join(pieces)


@pytest.mark.parametrize("missing", [1, 2, 3])
@pytest.mark.parametrize("make", [sentencepiece, byte_level])
def test_text_that_ends_within_a_character_has_all_before_it(make, missing):
    """A run of bytes that is cut, as by max_tokens."""
    tokenizer = make()
    ids = tokenizer("a🎉🎉", add_special_tokens=False).input_ids[:-missing]
    texts = {pushed(tokenizer, [50], blocks, SamplingParams())[2] for blocks in splits(ids, 5)}
    (text,) = texts
    assert text.rstrip("\ufffd").endswith("a🎉")


def test_invalid_bytes_with_byte_fallback_do_not_depend_on_blocks():
    tokenizer = sentencepiece()
    source = random.Random(6)
    for seed in range(20):
        ids = [source.randrange(len(tokenizer)) for _ in range(25)]
        expected = full_text(tokenizer, ids, SamplingParams())
        for blocks in splits(ids, seed, 4):
            _, _, text, pieces = pushed(tokenizer, [], blocks, SamplingParams())
            assert text == expected == "".join(pieces)


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize(
    "stop", ["END", "本語 E", "d”", "🦜", ["xyz", "of it"], ["Z", "of it"], ["t", "quoted"]]
)
def test_stop_strings_cut_alike_in_any_blocks(byte_tokenizer, stop, include):
    params = SamplingParams(stop=stop, include_stop_str_in_output=include)
    ids = byte_tokenizer(TEXT).input_ids
    # the first to be complete
    end, first = min((TEXT.find(s) + len(s), s) for s in params.stop if s in TEXT)
    at = end - len(first)
    for blocks in splits(ids, 2):
        kept, stop_string, text, pieces = pushed(byte_tokenizer, [], blocks, params)
        assert stop_string == first and text == TEXT[: end if include else at] == "".join(pieces)
        # ends with the token that completes the stop
        assert byte_tokenizer.decode(ids[:kept]) == TEXT[:end]


def test_request_of_stop_strings_complete_before_min_tokens_goes_on(byte_tokenizer):
    ids = byte_tokenizer("ab ab ab").input_ids
    params = SamplingParams(stop="ab", min_tokens=4)
    for blocks in splits(ids, 3):
        detokenizer = Detokenizer(byte_tokenizer, [5, 6], params)
        options = {"generator": None, "max_model_len": 99, "detokenizer": detokenizer}
        request = Request("0", 0, [5, 6], params, **options)
        while not request.finished:
            request.commit(blocks.pop(0))
        assert request.output_token_ids == ids[:5]
        assert (request.stop_reason, detokenizer.text) == ("ab", "ab ")


def test_special_tokens_are_skipped_unless_asked_for(byte_tokenizer):
    ids = [
        *byte_tokenizer("hi").input_ids,
        byte_tokenizer.eos_token_id,
        *byte_tokenizer(" you").input_ids,
    ]
    assert full_text(byte_tokenizer, ids, SamplingParams()) == "hi you"
    assert full_text(byte_tokenizer, ids, SamplingParams(skip_special_tokens=False)) == "hi</s> you"
