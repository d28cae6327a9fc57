"""A draft model reads and proposes what the target's tokens stand for, byte by byte."""

from __future__ import annotations

import functools
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from draftsmith.speculators.errors import CheckpointError, ConfigError
from draftsmith.speculators.vocab.token_bytes import TokenBytes, same_vocabulary, token_bytes
from draftsmith.speculators.vocab.token_map import FILE, TokenMap
from tests.support.errors import raises_at
from tests.support.tokenizers import CORPUS, byte_level, sentencepiece, spell

TARGET = Path(__file__).parents[3] / "recipes" / "quickstart" / "target"
TEXT = "The girl thought: läuft the café 🙂\n    return 42  # 日本語, не кошка\n\n\tÀ la carte "

MAKERS = {
    "byte level": byte_level,
    "larger byte level": lambda: byte_level(600, ("<pad>", "<|end|>"), added=["<think>", "    "]),
    "sentencepiece": sentencepiece,
    "unigram": lambda: sentencepiece("unigram"),
    "quickstart": lambda: AutoTokenizer.from_pretrained(TARGET),
}
# Each as a target and as a draft model, of its own kind and of another.
PAIRS = list(zip(MAKERS, [*list(MAKERS)[1:], "byte level"]))
PAIRS += [("byte level", "unigram"), ("sentencepiece", "larger byte level")]


@pytest.fixture(scope="module")
def tokenizer():
    return functools.cache(lambda name: MAKERS[name]())


def bytes_of(tokenizer) -> TokenBytes:
    return token_bytes(tokenizer, "it", math.inf)


def between(target, draft, extra=0):
    return TokenMap.between(target, draft, len(target) + extra, len(draft))


def written(surfaces, ids):
    return b"".join(surfaces.text.get(id, b"") for id in ids)


@pytest.mark.parametrize("name", MAKERS)
def test_surfaces_join_to_the_text_and_a_tokenizer_is_itself(tokenizer, name):
    reader = tokenizer(name)
    surfaces, token_map, everything = (
        bytes_of(reader),
        between(reader, reader),
        torch.arange(len(reader)),
    )
    for text in [*CORPUS, TEXT]:
        ids = reader(text, add_special_tokens=False).input_ids
        assert written(surfaces, ids).decode().removeprefix(" ") == text
    assert surfaces.text.keys() | surfaces.added.keys() == set(reader.get_vocab().values())
    for same in (token_map.target_ids, token_map.draft_ids, token_map.spelling_ids):
        assert torch.equal(same, everything)
    assert len(token_map.opening_ids) == 0 and same_vocabulary(reader, reader) is None


def test_special_tokens_are_not_text_and_other_added_tokens_are(tokenizer):
    reader = tokenizer("larger byte level")
    surfaces, ids = bytes_of(reader), reader.get_vocab()
    assert ids["<pad>"] not in surfaces.text and surfaces.added[ids["<pad>"]] == "<pad>"
    assert surfaces.text[ids["<think>"]] == b"<think>" == surfaces.added[ids["<think>"]].encode()
    assert tokenizer("sentencepiece").unk_token_id not in bytes_of(tokenizer("sentencepiece")).text


@pytest.mark.parametrize("target, draft", PAIRS)
def test_shared_tokens_and_spellings_are_what_the_target_wrote(tokenizer, target, draft):
    a, b = bytes_of(tokenizer(target)), bytes_of(tokenizer(draft))
    token_map = between(tokenizer(target), tokenizer(draft), extra=3)
    pairs = dict(zip(token_map.target_ids.tolist(), token_map.draft_ids.tolist()))
    assert (token_map.target_ids.diff() > 0).all() and len(set(pairs.values())) == len(pairs)
    for id, other in pairs.items():
        both_text = id in a.text and other in b.text
        assert (a.text[id] == b.text[other]) if both_text else (a.added[id] == b.added[other])
        assert spell(token_map, [id]) == [other]
    common = set(a.text.values()) & set(b.text.values())
    assert common == {a.text[id] for id in pairs if id in a.text}
    for id in range(token_map.vocab_size):
        if id in a.text:
            assert written(b, spell(token_map, [id])) == a.text[id]
        elif id not in pairs:
            assert spell(token_map, [id]) == []
    spelt = spell(token_map, tokenizer(target)(TEXT, add_special_tokens=False).input_ids)
    assert tokenizer(draft).decode(spelt).removeprefix(" ") == TEXT


def test_longest_match_and_bytes_that_nothing_covers():
    target = byte_level(600)
    draft = sentencepiece(fallback=False)
    a, b = bytes_of(target), bytes_of(draft)
    token_map = between(target, draft)
    known = set(b.text.values())
    assert not any(text in known for text in [b"\x00", b"\xc3"])
    left_out = 0
    for id in a.text:
        text, at, expected = a.text[id], 0, []
        while at < len(text):
            fits = [n for n in range(1, len(text) - at + 1) if text[at : at + n] in known]
            expected += [text[at : at + fits[-1]]] if fits else []
            left_out += not fits
            at += fits[-1] if fits else 1
        assert [b.text[token] for token in spell(token_map, [id])] == expected
    assert left_out > 0


def test_special_tokens_meet_added_tokens_of_the_same_content_only():
    target = byte_level(special=("<|end|>", "<|im_start|>", "q", "<x>"))
    draft = byte_level(500, special=("<pad>", "<|end|>"), added=["<x>"])
    token_map, target_ids, draft_ids = between(target, draft), target.get_vocab(), draft.get_vocab()
    for shared in ("<|end|>", "<x>"):
        assert spell(token_map, [target_ids[shared]]) == [draft_ids[shared]]
    for other in ("<|im_start|>", "q"):
        assert spell(token_map, [target_ids[other]]) == []
    assert b"q" in bytes_of(draft).text.values()


def test_a_byte_token_gives_way_to_the_plain_one(tokenizer):
    target, draft = tokenizer("byte level"), tokenizer("sentencepiece")
    token_map, ids, plain_id = between(target, draft), draft.get_vocab(), target.get_vocab()["A"]
    assert spell(token_map, [plain_id]) == [ids["A"]] and ids["<0x41>"] not in token_map.draft_ids
    back = between(draft, target)
    assert spell(back, [ids["<0x41>"]]) == spell(back, [ids["A"]]) == [plain_id]


def test_the_opening_is_the_drafts_unless_the_target_writes_it(tokenizer):
    plain, draft = tokenizer("byte level"), sentencepiece(bos=True)
    assert between(plain, draft).opening_ids.tolist() == [draft.get_vocab()["<s>"]]
    assert between(plain, tokenizer("sentencepiece")).opening_ids.tolist() == []
    assert between(draft, draft).opening_ids.tolist() == []
    assert between(draft, plain).opening_ids.tolist() == []


@pytest.mark.parametrize("opening", [False, True])
def test_rows_are_the_list_version(tokenizer, opening):
    target, draft = tokenizer("larger byte level"), sentencepiece(bos=opening)
    token_map, generator = between(target, draft), torch.Generator().manual_seed(0)
    for shape in [(5, 7), (3, 0), (0, 4)]:
        ids = torch.randint(0, token_map.vocab_size, shape, generator=generator)
        counts = torch.randint(0, shape[1] + 1, shape[:1], generator=generator)
        begins = torch.rand(shape[0], generator=generator) < 0.5
        padding = torch.arange(shape[1]) >= counts[:, None]
        hidden = ids.masked_fill(padding, -1)  # which may be anything
        spelt, lengths = token_map.spell_rows(hidden, counts, begins)
        assert spelt.shape == (shape[0], max([1, *lengths.tolist()]))
        for row, count, start, row_ids, length in zip(ids, counts, begins, spelt, lengths):
            expected = token_map.opening_ids.tolist() if start and count else []
            expected += spell(token_map, row[:count].tolist())
            assert row_ids[:length].tolist() == expected and (row_ids[length:] == 0).all()


def test_saved_and_loaded(tokenizer, tmp_path):
    target, draft = tokenizer("larger byte level"), sentencepiece(bos=True)
    token_map = between(target, draft, extra=2)
    token_map.save(tmp_path)
    again = TokenMap.load(tmp_path, len(target) + 2, len(draft))
    assert all(torch.equal(tensor, vars(again)[name]) for name, tensor in vars(token_map).items())


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.pop("draft_ids"),
        lambda t: t.update(draft_ids=t["draft_ids"] + 10_000),
        lambda t: t.update(spelling_offsets=t["spelling_offsets"][:-1]),
        lambda t: t.update(spelling_ids=t["spelling_ids"][:-1]),
    ],
)
def test_a_damaged_file_is_refused_by_its_path(tokenizer, tmp_path, change):
    target, draft = tokenizer("larger byte level"), tokenizer("byte level")
    sizes = (len(target), len(draft))
    with pytest.raises(CheckpointError, match=FILE):
        TokenMap.load(tmp_path, *sizes)
    between(target, draft).save(tmp_path)
    tensors = load_file(tmp_path / FILE)
    change(tensors)
    save_file(tensors, tmp_path / FILE)
    with raises_at(CheckpointError, tmp_path / FILE):
        TokenMap.load(tmp_path, *sizes)


def _tokenizer(model=None, **parts):
    tokenizer = Tokenizer(model or models.BPE())
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.mark.parametrize(
    "draft",
    [
        _tokenizer(models.BPE(end_of_word_suffix="</w>"), decoder=decoders.ByteLevel()),
        _tokenizer(),  # no sign for a space
        _tokenizer(decoder=decoders.CTC()),
        _tokenizer(decoder=decoders.Sequence([decoders.Fuse(), decoders.Metaspace()])),
        _tokenizer(decoder=decoders.ByteLevel(), pre_tokenizer=pre_tokenizers.Metaspace()),
        _tokenizer(decoder=decoders.Metaspace(), pre_tokenizer=pre_tokenizers.ByteLevel()),
    ],
)
def test_tokens_whose_text_cannot_be_established_are_refused(tokenizer, draft):
    with pytest.raises(ConfigError) as error:
        TokenMap.between(tokenizer("byte level"), draft, 400, 400)
    assert error.value.where.startswith("the draft model's tokenizer")


def test_no_backend_and_next_to_nothing_in_common_are_refused():
    with pytest.raises(ConfigError):
        bytes_of(object())
    tokenizer = Tokenizer(models.BPE(dict(zip("abcdefg▁", range(8))), []))
    tokenizer.decoder = decoders.Metaspace()
    with pytest.raises(ConfigError, match="share 8"):
        TokenMap.between(byte_level(), PreTrainedTokenizerFast(tokenizer_object=tokenizer), 400, 8)


@pytest.mark.parametrize(
    "target, draft, example",
    [
        ({"size": 300}, {"size": 400}, ""),
        ({"size": 400}, {"size": 300}, ""),
        ({}, {"size": 401, "special": ("<pad>", "<|end|>")}, "'!'"),
        ({"added": ["<a>"]}, {"added": ["<b>"]}, "'<a>', '<b>'"),
        ({"added": ["<a>", "<b>"]}, {"added": ["<b>"]}, "'<b>'"),
    ],
)
def test_vocabularies_that_differ_are_told_apart_with_examples(target, draft, example):
    reason = same_vocabulary(byte_level(**target), byte_level(**draft))
    assert reason is not None and example in reason


def test_a_model_line_with_more_added_tokens_is_the_same():
    small, large = byte_level(), byte_level(added=["<think>", "</think>"], pad_token="<pad>")
    assert same_vocabulary(large, small) is None and same_vocabulary(small, large) is None
