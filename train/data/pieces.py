"""Tokens of texts that begin alike, at the price of what they do not share.

Every turn of a conversation is tokenised with all that came before it. Fast tokenizers cut a text
at its special tokens first, and tokenise what lies between them piece by piece; so a piece that is
known needs no second look. A special token cuts if that shows on samples of text around it: one
that takes spaces beside it, for one, does not. What was put together so is to be held against the
tokens of a whole text (`as_whole`)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise

import numpy as np
from transformers import PreTrainedTokenizerBase

# Text on both sides of a special token.
SIDES = (("", ""), ("a", "a"), ("a ", " a"), ("a\n", "\na"), ("\n\n", "\n\n"), ("é.", ".é"))


class SpecialTokens:
    """The special tokens of a tokenizer, as the places where its texts can be cut."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self._cuts: dict[str, bool] = {}

    def pieces(self, text: str) -> list[str]:
        """Parts of `text`, each but the first from a special token on, whose tokens joined are the
        text's."""
        matches = self._pattern.finditer(text) if self._pattern is not None else ()
        starts = [match.start() for match in matches if self._is_cut(match.group())]
        edges = [0, *(start for start in starts if start), len(text)]
        return [text[start:stop] for start, stop in pairwise(edges)]

    @cached_property
    def _pattern(self) -> re.Pattern[str] | None:
        """Of the added tokens, the longest first, as tokenizers look for them."""
        if not self.tokenizer.is_fast:
            return None
        added = [token.content for token in self.tokenizer.added_tokens_decoder.values()]
        names = sorted(filter(None, added), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, names))) if names else None

    def _is_cut(self, token: str) -> bool:
        if token not in self._cuts:
            self._cuts[token] = all(self._cuts_between(token, *sides) for sides in SIDES)
        return self._cuts[token]

    def _cuts_between(self, token: str, before: str, after: str) -> bool:
        alone = self.tokenizer.convert_tokens_to_ids(token)
        behind = tokenise(self.tokenizer, token + after)
        joined = tokenise(self.tokenizer, before + token + after)
        return behind[:1] == [alone] and joined == tokenise(self.tokenizer, before) + behind


class PiecewiseTokenizer:
    """The tokens of the texts of one conversation. `special`: None to tokenise each text whole."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, special: SpecialTokens | None = None
    ) -> None:
        self.tokenizer = tokenizer
        self._special = special
        self._known: dict[str, list[int]] = {}
        self._longest = ""

    def encode(self, text: str) -> list[int]:
        """Its token ids; no BOS is added."""
        self._longest = max(self._longest, text, key=len)
        ids: list[int] = []
        for piece in self._pieces(text):
            ids += self._ids(piece)
        return ids

    def marked(self, text: str, marks: Sequence[tuple[int, int]], first: int) -> np.ndarray:
        """Which tokens of `text` have a character within `marks` [start, end), from token `first`
        on: bool [T]. Of a character that is several tokens, all."""
        masks = []
        # characters and tokens before a piece
        begin = 0
        done = 0
        for piece in self._pieces(text):
            mask = np.zeros(len(self._ids(piece)), dtype=bool)
            if done + len(mask) > first:
                inside = [
                    (start - begin, stop - begin)
                    for start, stop in marks
                    if start < begin + len(piece) and stop > begin
                ]
                spans = _spans(self.tokenizer, piece) if inside else ()
                for token, (start, stop) in enumerate(spans):
                    mask[token] = any(a < stop and b > start for a, b in inside)
            masks.append(mask)
            begin += len(piece)
            done += len(mask)
        whole = np.concatenate(masks)
        whole[:first] = False
        return whole

    def as_whole(self) -> bool:
        """True if the longest text so far, tokenised whole, has the tokens it was given."""
        return tokenise(self.tokenizer, self._longest) == self.encode(self._longest)

    def _pieces(self, text: str) -> list[str]:
        return [text] if self._special is None else self._special.pieces(text)

    def _ids(self, piece: str) -> list[int]:
        if piece not in self._known:
            self._known[piece] = tokenise(self.tokenizer, piece)
        return self._known[piece]


def tokenise(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The tokens of rendered text: no BOS is added, templates write their own."""
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def _spans(tokenizer: PreTrainedTokenizerBase, text: str) -> list[tuple[int, int]]:
    """The characters [start, stop) of each token."""
    options = {"add_special_tokens": False, "return_offsets_mapping": True, "verbose": False}
    return tokenizer(text, **options)["offset_mapping"]
