"""The bytes that each token of a tokenizer adds to a text, and a comparison of two vocabularies.

The bytes are derived from the tokenizer's own decoder.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from draftsmith.speculators.errors import ConfigError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")

# The characters that byte-level tokenizers write bytes with -> the byte.
_ALPHABET = {character: byte for byte, character in bytes_to_unicode().items()}


@dataclass(frozen=True)
class TokenBytes:
    """`text`: the bytes of every token that is text. `added`: the content of every added token.

    A *special* token (`<|im_end|>`: control, not text) is in `added` only. An added token that is
    not special (`<think>`, a run of spaces) is in both. `byte_tokens` (`<0x41>`) stand for a byte
    that an ordinary token of the same vocabulary may stand for as well."""

    text: dict[int, bytes]
    added: dict[int, str]
    byte_tokens: frozenset[int]


def token_bytes(tokenizer: PreTrainedTokenizerBase, whose: str, size: float) -> TokenBytes:
    """The bytes of all tokens with text and an id below `size`, for byte-level vocabularies and
    those that mark a space by a sign such as '▁'.

    `whose` names the tokenizer in errors. ConfigError if a token's bytes depend on its neighbours
    (WordPiece, suffixed BPE), or if the decoder is unknown or missing."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ConfigError(
            "no tokenizer.json, so the bytes of its tokens"
            " are unknown; use a model with a fast tokenizer",
            where=f"{whose} ({type(tokenizer).__name__})",
        )
    fields = json.loads(backend.to_str())
    decoder = _Decoder.read(fields, whose)
    vocabulary = backend.get_vocab(with_added_tokens=False)
    added = {id: token.content for id, token in tokenizer.added_tokens_decoder.items()}
    special = {id for id, token in tokenizer.added_tokens_decoder.items() if token.special}
    unknown = _unknown_token(fields["model"], vocabulary)
    if unknown is not None:
        special.add(unknown[0])
        added.setdefault(*unknown)
    text = {id: content.encode() for id, content in added.items() if id not in special}
    ordinary = {id: token for token, id in vocabulary.items() if id not in special}
    text |= {id: decoder.bytes_of(token) for id, token in ordinary.items()}
    return TokenBytes(
        {id: content for id, content in text.items() if id < size and content},
        {id: content for id, content in added.items() if id < size},
        frozenset(id for id, token in ordinary.items() if decoder.byte_of(token) is not None),
    )


def _unknown_token(model: dict[str, Any], vocabulary: dict[str, int]) -> tuple[int, str] | None:
    """(id, content) of the unknown token, which is never text."""
    if model.get("unk_id") is not None:  # Unigram
        return model["unk_id"], model["vocab"][model["unk_id"]][0]
    token = model.get("unk_token")
    return (vocabulary[token], token) if token in vocabulary else None


@dataclass(frozen=True)
class _Decoder:
    """A tokenizer's decoder for single tokens: replacements first, then conversion to bytes.

    Steps for the two ends of the whole text (dropping the leading space) are left out.
    """

    replacements: tuple[tuple[str, str], ...]
    bytes_by: str | None  # "ByteLevel", "ByteFallback" or neither

    @classmethod
    def read(cls, fields: dict[str, Any], whose: str) -> _Decoder:
        """Reads a tokenizer.json. ConfigError for a decoder that joins tokens.

        Its steps are replacements, then the conversion to bytes, then the fusion of all tokens;
        ByteLevel converts and fuses. A `Strip` of the fused text concerns its ends and is passed
        over. Steps in another order, or of other types, are not known: a replacement behind the
        fusion could change a token by its neighbours."""
        model = fields["model"]
        steps = _flat(fields["decoder"])
        replacements: list[tuple[str, str]] = []
        bytes_by = None
        joined = False  # the tokens are one text from here on
        known = not (model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"))
        for step in steps:
            kind = step["type"]
            pattern = step.get("pattern") or {}
            if kind == "Fuse" or (kind == "Strip" and joined):
                joined = True
            elif joined or bytes_by is not None:
                known = False
            elif kind in ("ByteLevel", "ByteFallback"):
                bytes_by = kind
                joined = kind == "ByteLevel"
            elif kind == "Metaspace":
                replacements.append((step["replacement"], " "))
            elif kind == "Replace" and "String" in pattern:
                replacements.append((pattern["String"], step["content"]))
            else:
                known = False
        encoder = {
            step["type"] for part in ("normalizer", "pre_tokenizer") for step in _flat(fields[part])
        }
        # Both ends write bytes in the same way, and a space is written by a sign.
        same = (bytes_by == "ByteLevel") == ("ByteLevel" in encoder)
        spaced = bytes_by == "ByteLevel" or " " in dict(replacements).values()
        if not (known and same and spaced):
            names = " + ".join(step["type"] for step in steps) or "none"
            raise ConfigError(
                "single tokens have no text there; use a draft model with a byte-level or"
                " sentencepiece-like tokenizer",
                where=f"{whose} (model {model.get('type')}, decoder {names})",
            )
        return cls(tuple(replacements), bytes_by)

    def bytes_of(self, token: str) -> bytes:
        """The bytes that an ordinary token adds to a text."""
        for old, new in self.replacements:
            token = token.replace(old, new)
        if self.bytes_by == "ByteLevel" and all(character in _ALPHABET for character in token):
            return bytes(_ALPHABET[character] for character in token)
        byte = self.byte_of(token)
        return token.encode() if byte is None else bytes([byte])

    def byte_of(self, token: str) -> int | None:
        """The byte that a token such as <0x41> stands for, where such tokens do."""
        match = _BYTE_TOKEN.fullmatch(token) if self.bytes_by == "ByteFallback" else None
        return int(match[1], 16) if match else None


def _flat(node: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The steps of a normalizer, pre-tokenizer or decoder, flattened."""
    if node is None:
        return []
    for key in ("decoders", "pretokenizers", "normalizers"):
        if key in node:
            return [step for part in node[key] for step in _flat(part)]
    return [node]


def same_vocabulary(target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase) -> str | None:
    """None if every id means the same to both tokenizers; else a count and examples of tokens that
    differ.

    Either may have added tokens at ids that the other does not use, as the sizes and generations of
    a model line do; ordinary tokens must be in both. The caller checks that the draft model's
    embedding has a row for each target id."""
    differing = _differing(target, draft) | _differing(draft, target)
    if not differing:
        return None
    examples = ", ".join(map(repr, sorted(differing)[:3]))
    return f"{len(differing):,} tokens are missing or stand at other ids, such as {examples}"


def _differing(one: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase) -> set[str]:
    """The tokens of `one` that `other` has at another id, or lacks, unless they are added tokens
    whose ids `other` does not use."""
    added = one.added_tokens_decoder
    known = other.get_vocab()
    taken = set(known.values())
    differing = set()
    for token, id in one.get_vocab().items():
        if token in known:
            agrees = known[token] == id
        else:
            agrees = id in added and id not in taken
        if not agrees:
            differing.add(token)
    return differing
