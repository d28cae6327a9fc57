"""Texts that are tokenised piece by piece have the tokens that they have as a whole, and what they
share is tokenised once."""

from __future__ import annotations

import copy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, pre_tokenizers
from transformers import AutoTokenizer

from draftsmith.train.data import loss_mask, pieces
from draftsmith.train.data.examples import parse_row
from draftsmith.train.data.loss_mask import ConversationTokenizer
from draftsmith.train.data.pieces import PiecewiseTokenizer, SpecialTokens, tokenise
from tests.support.targets import TOKENIZER

END = "<|im_end|>"
GREEDY = "<gap>"  # takes the spaces before it


@pytest.fixture(scope="module")
def tokenizer():
    loaded = AutoTokenizer.from_pretrained(TOKENIZER)
    gap = AddedToken(GREEDY, lstrip=True, special=True)
    loaded.add_special_tokens(
        {"additional_special_tokens": [gap]}, replace_extra_special_tokens=False
    )
    return loaded


def of_sentences(tokenizer):
    """The tokenizer with a mark before the first word of a text, as SentencePiece's have."""
    marking = copy.deepcopy(tokenizer)
    first = pre_tokenizers.Metaspace(replacement="a", prepend_scheme="first")
    backend = marking.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence([first, backend.pre_tokenizer])
    return marking


texts = st.lists(st.sampled_from([END, GREEDY, "<|im_start|>", "hi", " ", "\n", "é.", "42"])).map(
    "".join
)


@pytest.mark.parametrize("marks", [False, True])
@settings(max_examples=60, deadline=None)
@given(text=texts)
def test_encode_by_pieces_is_encode_of_the_whole(tokenizer, marks, text):
    tokenizer = of_sentences(tokenizer) if marks else tokenizer
    by_pieces = PiecewiseTokenizer(tokenizer, SpecialTokens(tokenizer))
    assert by_pieces.encode(text) == tokenise(tokenizer, text)
    assert by_pieces.as_whole()


def test_pieces_begin_at_special_tokens_that_take_nothing_beside_them(tokenizer):
    text = f"a {GREEDY} b{END} c"
    assert SpecialTokens(tokenizer).pieces(text) == [f"a {GREEDY} b", f"{END} c"]


def test_marked_tokens_are_those_with_a_character_inside(tokenizer):
    text = f"no{END}\nyes é{END}"
    by_pieces = PiecewiseTokenizer(tokenizer, SpecialTokens(tokenizer))
    ids = by_pieces.encode(text)
    start = text.index("yes")
    mask = by_pieces.marked(text, [(0, 2), (start, start + len("yes é"))], first=2)
    inside = [i for i, keep in zip(ids, mask) if keep]
    assert tokenizer.decode(inside) == "yes é"
    assert not mask[:2].any()


def messages(count: int) -> list[dict]:
    return [
        {"role": ("user", "assistant")[i % 2], "content": f"Turn {i} of the talk."}
        for i in range(count)
    ]


def test_rows_of_many_turns_tokenise_what_they_share_once(tokenizer, monkeypatch):
    read = []

    def counted(tokenizer, text):
        read.append(len(text))
        return tokenise(tokenizer, text)

    monkeypatch.setattr(pieces, "tokenise", counted)
    (row,) = ConversationTokenizer(tokenizer).rows(
        parse_row({"messages": messages(40)}, origin="x")
    )
    text = tokenizer.decode(row.input_ids)
    assert sum(read) < 4 * len(text)


def test_rows_whose_pieces_are_not_those_of_the_whole_are_tokenised_whole(tokenizer, monkeypatch):
    example = parse_row({"messages": messages(6)}, origin="x")
    (right,) = ConversationTokenizer(tokenizer).rows(example)

    class EveryLetter(SpecialTokens):
        def pieces(self, text):
            return list(text)

    monkeypatch.setattr(loss_mask, "SpecialTokens", EveryLetter)
    (row,) = ConversationTokenizer(tokenizer).rows(example)
    assert row.input_ids.tolist() == right.input_ids.tolist()
    assert row.loss_mask.tolist() == right.loss_mask.tolist()
