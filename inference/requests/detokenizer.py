"""Token ids to text, block by block, and stop strings wherever they fall across blocks.

The text after n tokens is a function of those n tokens alone: how they were split into blocks
changes neither the text nor the token that a stop string ends at."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from draftsmith.inference.sampling_params import SamplingParams

# prompt tokens kept as left context: a first token decodes as it does after them (leading spaces)
CONTEXT = 6
PARTS = 3  # tokens of a character before its last one, at most: it has up to four bytes
REPLACEMENT = "\ufffd"  # what decoders write for bytes that are not (yet) a character


class Detokenizer:
    """One response's text. `text` never ends in a half-decoded character until `finish`."""

    def __init__(
        self, tokenizer: Any, prompt_token_ids: Sequence[int], params: SamplingParams
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special = params.skip_special_tokens
        self._stops = list(params.stop)
        self._include_stop = params.include_stop_str_in_output
        longest = max(map(len, self._stops), default=1)
        self._held = 0 if self._include_stop else longest - 1
        self.text = ""
        self._sent = 0
        self._stopped = False
        # the ids decoded together: those from `_read` on are new, those before only give context
        self._ids = self._context(prompt_token_ids)
        self._read = len(self._ids)
        self._known = self._decode(self._ids)  # the text of the context
        self._base = ""  # text up to `_read`

    def push(self, token_ids: Sequence[int], first_checked: int = 0) -> tuple[int, str | None]:
        """Adds a block; returns how many of its tokens the response keeps, the one that completes a
        stop string being the last, and this stop string, if any.

        The text is cut before it (after it with include_stop_str_in_output). Those that are
        complete before token `first_checked` do not count."""
        if not self._stops:
            self._extend(token_ids)
            return len(token_ids), None
        for i, token in enumerate(token_ids):
            checked = len(self.text)
            self._extend([token])
            if i < first_checked:
                continue
            # where each stop string begins that ends after the characters that were checked
            starts = [self.text.find(s, max(0, checked - len(s) + 1)) for s in self._stops]
            start = min((place for place in starts if place >= 0), default=None)
            if start is not None:
                stop = self._stops[starts.index(start)]
                self.text = self.text[: start + len(stop) if self._include_stop else start]
                self._stopped = True
                return i + 1, stop
        return len(token_ids), None

    def finish(self) -> str:
        """The final text; bytes that never became a character show as U+FFFD."""
        if not self._stopped:
            self._stopped = True
            self.text = self._base + self._new_text()
        return self.text

    def take(self) -> str:
        """The text that is new since the last call and can no longer turn out to be part of a stop
        string."""
        end = len(self.text) if self._stopped else max(self._sent, len(self.text) - self._held)
        new = self.text[self._sent : end]
        self._sent = end
        return new

    def _extend(self, token_ids: Sequence[int]) -> None:
        self._ids += token_ids
        new = self._new_text()
        if REPLACEMENT in new and len(token_ids) > 1:
            # byte fallback decodes no byte of a run that ends within a character: one by one, what
            # is whole before that is known
            del self._ids[-len(token_ids) :]
            for token in token_ids:
                self._extend([token])
            return
        stable = new.rstrip(REPLACEMENT)
        self.text = self._base + stable
        # ends on a character: forget what lies before the block
        if new and stable == new:
            self._base = self.text
            self._ids = self._ids[self._read :]
            self._read = len(self._ids)
            self._known = self._decode(self._ids)

    def _new_text(self) -> str:
        """The text of the ids from `_read` on. Where bytes among them take the context's last
        characters along, they are decoded alone: no character follows another within its bytes."""
        decoded = self._decode(self._ids)
        broken = REPLACEMENT in decoded and not decoded.startswith(self._known)
        if broken and REPLACEMENT not in self._known:
            return self._decode(self._ids[self._read :])
        return decoded[len(self._known) :]

    def _context(self, prompt: Sequence[int]) -> list[int]:
        """The last tokens of the prompt, from the beginning of a character on: byte fallback
        decodes no byte of a run that begins within one. Where the prompt itself ends within a
        character, no beginning is found, and they are CONTEXT."""
        for most in range(CONTEXT, CONTEXT + PARTS + 1):
            context = list(prompt[-most:])
            if REPLACEMENT not in self._decode(context):
                return context
        return list(prompt[-CONTEXT:])

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(
            token_ids, skip_special_tokens=self._skip_special, clean_up_tokenization_spaces=False
        )
