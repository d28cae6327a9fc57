"""Small tokenizers of the kinds that exist: byte-level ones and sentencepiece's."""

from __future__ import annotations

import json
from functools import cache

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
from transformers import PreTrainedTokenizerFast

from draftsmith.speculators.vocab.token_map import TokenMap

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the other dogs jump after it: 0123456789"
    " times!",
    "Ein Mädchen läuft über die Straße; 日本語のテキスト, кошка и собака, naïve café –"
    " “quoted” … 🙂",
    "def add(left, right):\n    return left + right  # two spaces\n\n\tindented with a tab"
    " <b>[x]</b> {y}",
    "ABCDEFGHIJKLMNOPQRSTUVWXYZ abcdefghijklmnopqrstuvwxyz 'it''s' the thing that they then"
    " thought through",
]


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


def spell(token_map: TokenMap, token_ids: list[int]) -> list[int]:
    """Target ids in draft ids, one after the other, without an opening."""
    spelling = []
    for id in token_ids:
        start, end = token_map.spelling_offsets[id : id + 2].tolist()
        spelling += token_map.spelling_ids[start:end].tolist()
    return spelling


@cache
def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, ids 0..255, and three special tokens."""
    template = "{% for m in messages %}<s>{{ m.role }}:{{ m.content }}</s>{% endfor %}<s>"
    return _of_bytes(template, bos_token="<s>", eos_token="</s>", pad_token="<pad>")


def chat_bytes() -> PreTrainedTokenizerFast:
    """One token per byte, ChatML-like markers."""
    template = (
        "{% for m in messages %}{{ m.role }}:{{ m.content }}<end>{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    return _of_bytes(template, eos_token="<end>", pad_token="<pad>")


def _of_bytes(chat_template: str, **special: str) -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: i for i, symbol in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special.values()))
    fields = {"tokenizer_object": tokenizer, "chat_template": chat_template}
    return PreTrainedTokenizerFast(**fields, **special)
