"""A draft model with another tokenizer reads and proposes what the target's tokens stand for, byte
by byte."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from speculators.errors import CheckpointError, ConfigError
from speculators.vocab.token_bytes import same_vocabulary, token_bytes
from speculators.vocab.token_map import FILE, TokenMap

TARGET = Path(__file__).parents[3] / "recipes" / "quickstart" / "target"
CORPUS = [
    (
        "The quick brown fox jumps over the lazy dog, and the other dogs jump after it: 0123456789"
        " times!"
    ),
    (
        "Ein Mädchen läuft über die Straße; 日本語のテキスト, кошка и собака, naïve café –"
        " “quoted” … 🙂"
    ),
    (
        "def add(left, right):\n    return left + right  # two spaces\n\n\tindented with a tab"
        " <b>[x]</b> {y}"
    ),
    (
        "ABCDEFGHIJKLMNOPQRSTUVWXYZ abcdefghijklmnopqrstuvwxyz 'it''s' the thing that they then"
        " thought through"
    ),
]
TEXT = (
    "The girl thought: läuft the café 🙂\n    return 42  # 日本語, не кошка\n\n\tÀ la carte"
    " <|im_start|>"
)


def byte_level(size=400, special=("<|end|>",), added=(), **kwargs):
    """GPT-2's kind."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(special),
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken(content, normalized=False) for content in added])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **kwargs)


def sentencepiece(kind="bpe", fallback=True, bos=False):
    """Llama's kind (BPE) or T5's with bytes (Unigram); '<0xNN>' tokens are ordinary ones."""
    if kind == "bpe":
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=fallback))
        trainer = trainers.BpeTrainer(
            vocab_size=300, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False
        )
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        tokenizer.train_from_iterator([line.replace(" ", "▁") for line in CORPUS], trainer)
    else:
        tokenizer = Tokenizer(models.Unigram())
        trainer = trainers.UnigramTrainer(
            vocab_size=250,
            special_tokens=["<unk>", "<s>", "</s>"],
            unk_token="<unk>",
            show_progress=False,
        )
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.train_from_iterator(CORPUS, trainer)
    space = decoders.Replace("▁", " ") if kind == "bpe" else decoders.Metaspace()
    steps = [space, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps if fallback else steps[:1])
    fields = json.loads(tokenizer.to_str())
    if fallback:
        names = [f"<0x{byte:02X}>" for byte in range(256)]
        entries = fields["model"]["vocab"]
        if kind == "bpe":
            entries |= {name: len(entries) + i for i, name in enumerate(names)}
        else:
            entries += [[name, -100.0] for name in names]
            fields["model"]["byte_fallback"] = True
    tokenizer = Tokenizer.from_str(json.dumps(fields))
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            "<s> $A", special_tokens=[("<s>", 1)]
        )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>")


MAKERS = {
    "byte level": byte_level,
    "larger byte level": lambda: byte_level(600, ("<pad>", "<|end|>"), added=["<think>", "    "]),
    "sentencepiece": sentencepiece,
    "unigram": lambda: sentencepiece("unigram"),
    "quickstart": lambda: AutoTokenizer.from_pretrained(TARGET),
}
PAIRS = [(a, b) for a in MAKERS for b in MAKERS]


@pytest.fixture(scope="module")
def tokenizer():
    """The function tokenizer(name), each made once."""
    return functools.cache(lambda name: MAKERS[name]())


def between(target, draft, extra=0):
    return TokenMap.between(target, draft, len(target) + extra, len(draft))


def written(found, ids):
    return b"".join(found.text.get(id, b"") for id in ids)


@pytest.mark.parametrize("name", MAKERS)
def test_surfaces_join_to_the_text(tokenizer, name):
    """What the tokens stand for one by one is the text they were made from (up to sentencepiece's
    leading space)."""
    tok, found = tokenizer(name), token_bytes(tokenizer(name), name)
    for text in [*CORPUS, TEXT.replace("<|im_start|>", "")]:
        ids = tok(text, add_special_tokens=False).input_ids
        assert written(found, ids).decode().removeprefix(" ") == text
    assert found.text.keys() | found.added.keys() == set(tok.get_vocab().values())


def test_special_tokens_are_not_text_and_other_added_tokens_are(tokenizer):
    tok = tokenizer("larger byte level")
    found, ids = token_bytes(tok, "it"), tok.get_vocab()
    assert ids["<pad>"] not in found.text and found.added[ids["<pad>"]] == "<pad>"
    assert found.text[ids["<think>"]] == b"<think>" == found.added[ids["<think>"]].encode()
    llama = tokenizer("sentencepiece")
    assert llama.unk_token_id not in token_bytes(llama, "it").text


@pytest.mark.parametrize("target, draft", PAIRS)
def test_shared_tokens_mean_the_same(tokenizer, target, draft):
    a, b = token_bytes(tokenizer(target), "a"), token_bytes(tokenizer(draft), "b")
    made = between(tokenizer(target), tokenizer(draft))
    assert (made.target_ids.diff() > 0).all() and len(made.draft_ids.unique()) == len(
        made.draft_ids
    )
    for mine, theirs in zip(made.target_ids.tolist(), made.draft_ids.tolist()):
        if mine in a.text and theirs in b.text:
            assert a.text[mine] == b.text[theirs]
        else:
            assert a.added[mine] == b.added[theirs]
        assert made.spell([mine]) == [theirs]
    common = set(a.text.values()) & set(b.text.values())
    assert common == {a.text[id] for id in made.target_ids.tolist() if id in a.text}


@pytest.mark.parametrize("target, draft", PAIRS)
def test_spellings_are_what_the_target_wrote(tokenizer, target, draft):
    """Every draft vocabulary here covers all bytes."""
    a, b = token_bytes(tokenizer(target), "a"), token_bytes(tokenizer(draft), "b")
    made = between(tokenizer(target), tokenizer(draft), extra=3)
    for id in range(made.vocab_size):
        spelling = made.spell([id])
        if id in a.text:
            assert written(b, spelling) == a.text[id]
        elif id not in made.target_ids:
            assert spelling == []
    text = TEXT.replace("<|im_start|>", "")
    spelt = made.spell(tokenizer(target)(text, add_special_tokens=False).input_ids)
    assert tokenizer(draft).decode(spelt).removeprefix(" ") == text


@pytest.mark.parametrize("name", MAKERS)
def test_a_tokenizer_and_itself(tokenizer, name):
    tok = tokenizer(name)
    made = between(tok, tok)
    everything = torch.arange(len(tok))
    assert torch.equal(made.target_ids, everything) and torch.equal(made.draft_ids, everything)
    assert torch.equal(made.spelling_ids, everything) and len(made.opening_ids) == 0
    assert same_vocabulary(tok, tok) is None


def test_longest_match_and_bytes_that_nothing_covers():
    target = byte_level(600)
    draft = sentencepiece(fallback=False)
    a, b = token_bytes(target, "a"), token_bytes(draft, "b")
    made = between(target, draft)
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
        assert [b.text[each] for each in made.spell([id])] == expected
    assert left_out > 0


def test_special_tokens_meet_added_tokens_of_the_same_content_only():
    target = byte_level(special=("<|end|>", "<|im_start|>", "q", "<x>"))
    draft = byte_level(500, special=("<pad>", "<|end|>"), added=["<x>"])
    made, theirs = between(target, draft), draft.get_vocab()
    spell = {
        token: made.spell([target.get_vocab()[token]])
        for token in ("<|end|>", "<|im_start|>", "q", "<x>")
    }
    assert spell == {
        "<|end|>": [theirs["<|end|>"]],
        "<|im_start|>": [],
        "q": [],
        "<x>": [theirs["<x>"]],
    }
    assert b"q" in token_bytes(draft, "it").text.values()


def test_a_byte_token_gives_way_to_the_plain_one(tokenizer):
    target, draft = tokenizer("byte level"), tokenizer("sentencepiece")
    made, ids = between(target, draft), draft.get_vocab()
    assert (
        made.spell([target.get_vocab()["A"]]) == [ids["A"]] and ids["<0x41>"] not in made.draft_ids
    )
    back = between(draft, target)
    assert back.spell([ids["<0x41>"]]) == back.spell([ids["A"]]) == [target.get_vocab()["A"]]


def test_ids_beyond_the_embeddings_cannot_occur(tokenizer):
    target, draft = tokenizer("larger byte level"), tokenizer("byte level")
    made = TokenMap.between(target, draft, 300, 290)
    assert made.vocab_size == 300 and made.target_ids.max() < 300
    assert made.draft_ids.max() < 290 and made.spelling_ids.max() < 290


def test_the_opening_is_the_drafts_unless_the_target_writes_it(tokenizer):
    plain, draft = tokenizer("byte level"), sentencepiece(bos=True)
    assert between(plain, draft).opening_ids.tolist() == [draft.get_vocab()["<s>"]]
    assert between(plain, tokenizer("sentencepiece")).opening_ids.tolist() == []
    assert between(draft, draft).opening_ids.tolist() == []
    assert between(draft, plain).opening_ids.tolist() == []


@pytest.mark.parametrize("opening", [False, True])
def test_rows_are_the_list_version(tokenizer, opening):
    target, draft = tokenizer("larger byte level"), sentencepiece(bos=opening)
    made, generator = between(target, draft), torch.Generator().manual_seed(0)
    for shape in [(5, 7), (1, 1), (3, 0), (0, 4)]:
        ids = torch.randint(0, made.vocab_size, shape, generator=generator)
        counts = torch.randint(0, shape[1] + 1, shape[:1], generator=generator)
        begins = torch.rand(shape[0], generator=generator) < 0.5
        hidden = ids.masked_fill(
            torch.arange(shape[1]) >= counts[:, None], -1
        )  # padding may be anything
        spelt, lengths = made.spell_rows(hidden, counts, begins)
        assert spelt.shape == (shape[0], max([1, *lengths.tolist()]))
        for row, count, start, got, length in zip(ids, counts, begins, spelt, lengths):
            expected = made.opening_ids.tolist() * bool(start and count) + made.spell(
                row[:count].tolist()
            )
            assert got[:length].tolist() == expected and (got[length:] == 0).all()
    assert torch.equal(
        made.spell_rows(ids, counts)[0], made.spell_rows(ids, counts, torch.zeros(0) > 0)[0]
    )


@pytest.mark.parametrize("opening", [False, True])
def test_packed_rows_are_each_document_alone(tokenizer, opening):
    target, draft = byte_level(600, ("<|end|>", "<|start|>")), sentencepiece(bos=opening)
    made, generator = between(target, draft), torch.Generator().manual_seed(1)
    silent = target.get_vocab()["<|start|>"]
    documents = [[0, 0, 1, 1, 1, 1, 2, 2, -1, -1], [0, 1, 1, 1, 1, 2, 2, 2, 3, 4], [-1] * 10]
    segments = torch.tensor(documents)
    ids = torch.randint(0, made.vocab_size, segments.shape, generator=generator)
    ids[0, [0, 4, 6, 7]] = ids[1, [0, 1, 2]] = silent
    packed = made.spell_packed(ids.masked_fill(segments < 0, -1), segments)
    for row in range(3):
        got = packed.segment_ids[row]
        for segment in range(5):
            tokens, mine = (
                ids[row, segments[row] == segment].tolist(),
                torch.where(got == segment)[0].tolist(),
            )
            expected = made.opening_ids.tolist() * bool(tokens) + made.spell(tokens)
            assert packed.input_ids[row, mine].tolist() == expected
            assert packed.position_ids[row, mine].tolist() == list(range(len(expected)))
            for n, end in enumerate(packed.ends[row, segments[row] == segment].tolist(), start=1):
                read = made.opening_ids.tolist() + made.spell(tokens[:n])
                assert end == (mine[len(read) - 1] if read else -1)
        assert (packed.ends[row, segments[row] < 0] == -1).all()
        padding = got < 0
        assert (
            not packed.input_ids[row, padding].any() and not packed.position_ids[row, padding].any()
        )
        assert padding.diff().sum() <= 1  # at the end


def test_coverage_counts_tokens_of_text(tokenizer):
    target, draft = tokenizer("larger byte level"), tokenizer("byte level")
    made = between(target, draft)
    counts = torch.zeros(made.vocab_size, dtype=torch.long)
    counts[made.target_ids[5]] = 3
    counts[next(id for id in range(made.vocab_size) if id not in made.target_ids)] = 1
    assert made.coverage(counts) == 0.75


def test_saved_and_loaded(tokenizer, tmp_path):
    target, draft = tokenizer("larger byte level"), sentencepiece(bos=True)
    made = between(target, draft, extra=2)
    made.save(tmp_path)
    again = TokenMap.load(tmp_path, len(target) + 2, len(draft))
    assert all(torch.equal(tensor, vars(again)[name]) for name, tensor in vars(made).items())


def _longer(tensors):
    return torch.cat([tensors["draft_ids"], tensors["draft_ids"][:1]])


@pytest.mark.parametrize(
    "change, expected",
    [
        (lambda t: t.pop("draft_ids"), "draft_ids is missing"),
        (lambda t: t.update(d2t=torch.zeros(1)), "d2t is unexpected"),
        (lambda t: t.update(target_ids=t["target_ids"].int()), "target_ids is torch.int32"),
        (lambda t: t.update(target_ids=t["target_ids"].flip(0)), "target_ids are not ascending"),
        (lambda t: t.update(draft_ids=t["draft_ids"] + 10_000), "draft_ids run from 10000"),
        (lambda t: t.update(draft_ids=_longer(t)), "draft_ids repeat"),
        (lambda t: t.update(draft_ids=t["draft_ids"].flip(0)), "not spelt by their draft_ids"),
        (lambda t: t.update(spelling_offsets=t["spelling_offsets"][:-1]), "do not divide"),
        (lambda t: t.update(spelling_offsets=torch.zeros(0, dtype=torch.long)), "do not divide"),
        (lambda t: t.update(spelling_ids=t["spelling_ids"] - 1), "spelling_ids run from -1"),
    ],
)
def test_a_damaged_file_is_named(tokenizer, tmp_path, change, expected):
    target, draft = tokenizer("larger byte level"), tokenizer("byte level")
    between(target, draft).save(tmp_path)
    tensors = load_file(tmp_path / FILE)
    change(tensors)
    save_file(tensors, tmp_path / FILE)
    with pytest.raises(CheckpointError, match=expected):
        TokenMap.load(tmp_path, len(target), len(draft))


def test_a_file_of_other_models_or_none(tokenizer, tmp_path):
    target, draft = tokenizer("larger byte level"), tokenizer("byte level")
    with pytest.raises(CheckpointError, match="not there"):
        TokenMap.load(tmp_path, len(target), len(draft))
    between(target, draft).save(tmp_path)
    with pytest.raises(CheckpointError, match="the target has 9"):
        TokenMap.load(tmp_path, 9, len(draft))
    with pytest.raises(CheckpointError, match="in a vocabulary of 100"):
        TokenMap.load(tmp_path, len(target), 100)
    (tmp_path / FILE).write_bytes(b"no")
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        TokenMap.load(tmp_path, len(target), len(draft))


def _wordpiece():
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "the": 1, "##re": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece()
    return tokenizer


def _edited(decoder=None, pre_tokenizer=None, model=None):
    tokenizer = Tokenizer(model or models.BPE())
    if decoder:
        tokenizer.decoder = decoder
    if pre_tokenizer:
        tokenizer.pre_tokenizer = pre_tokenizer
    return tokenizer


@pytest.mark.parametrize(
    "make, reason",
    [
        (_wordpiece, "continuing_subword_prefix is '##'"),
        (
            lambda: _edited(decoders.ByteLevel(), model=models.BPE(end_of_word_suffix="</w>")),
            "end_of_word_suffix",
        ),
        (_edited, "no sign stands for a space"),
        (lambda: _edited(decoders.CTC()), "CTC is not a step"),
        (lambda: _edited(decoders.Strip(" ", 1, 0)), "Strip is not a step"),
        (
            lambda: _edited(decoders.Sequence([decoders.Fuse(), decoders.Metaspace()])),
            "after its tokens were joined",
        ),
        (
            lambda: _edited(decoders.ByteLevel(), pre_tokenizers.Metaspace()),
            "turned into tokens by Metaspace",
        ),
        (
            lambda: _edited(decoders.Metaspace(), pre_tokenizers.ByteLevel()),
            "turned into tokens by ByteLevel",
        ),
    ],
)
def test_tokens_whose_text_cannot_be_established(tokenizer, make, reason):
    draft = PreTrainedTokenizerFast(tokenizer_object=make())
    with pytest.raises(ConfigError, match=f"the draft model's tokenizer.*{reason}"):
        TokenMap.between(tokenizer("byte level"), draft, 400, 400)


def test_a_tokenizer_without_a_backend():
    with pytest.raises(ConfigError, match=r"it \(object\): no tokenizer.json"):
        token_bytes(object(), "it")


def test_next_to_nothing_in_common():
    tokenizer = Tokenizer(models.BPE(dict(zip("abcdefg▁", range(8))), []))
    tokenizer.decoder = decoders.Metaspace()
    with pytest.raises(ConfigError, match=r"share 8 of them, 2\.0% of the target's and 100\.0%"):
        TokenMap.between(byte_level(), PreTrainedTokenizerFast(tokenizer_object=tokenizer), 400, 8)


def test_a_model_line_with_more_added_tokens_is_the_same():
    small, large = byte_level(), byte_level(added=["<think>", "</think>"], pad_token="<pad>")
    assert same_vocabulary(large, small) is None and same_vocabulary(small, large) is None


@pytest.mark.parametrize(
    "target, draft, reason",
    [
        (
            lambda: byte_level(300),
            lambda: byte_level(400),
            r"tokens are only in the draft model's \('.+', '.+', …\)",
        ),
        (lambda: byte_level(400), lambda: byte_level(300), "tokens are only in the target's"),
        (byte_level, lambda: byte_level(401, ("<pad>", "<|end|>")), "'!': 1 and 2"),
        (
            lambda: byte_level(added=["<a>"]),
            lambda: byte_level(added=["<b>"]),
            "1 ids stand .*400: '<a>' and '<b>'",
        ),
        (
            lambda: byte_level(added=["<a>", "<b>"]),
            lambda: byte_level(added=["<b>"]),
            "1 of 402 tokens have another",
        ),
    ],
)
def test_what_differs_is_said(target, draft, reason):
    assert re.search(reason, same_vocabulary(target(), draft()) or "the same")
