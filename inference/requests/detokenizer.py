"""Token ids to text, block by block, and stop strings wherever they fall across blocks.

The text after n tokens is a function of those n tokens alone: how they were split into blocks (by
drafting, streaming or not at all) changes neither the text nor the token that a stop string ends
at. Knows no engine and no requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from draftsmith.inference.sampling_params import SamplingParams

# prompt tokens kept as left context: a first token decodes as it does after them (leading spaces)
CONTEXT = 6
REPLACEMENT = "\ufffd"  # what decoders write for bytes that are not (yet) a character


class Detokenizer:
    """One response's text. `text` never ends in a half-decoded character until `finish`."""

    def __init__(
        self, tokenizer: Any, prompt_token_ids: Sequence[int], params: SamplingParams
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special = params.skip_special_tokens
        self._stops = tuple(params.stop or ())
        self._include_stop = params.include_stop_str_in_output
        self._held = (
            0 if self._include_stop else max((len(stop) - 1 for stop in self._stops), default=0)
        )
        self.text = ""
        self._sent = 0
        self._stopped = False
        # the ids decoded together: those from `_read` on are new, those before only give context
        self._ids: list[int] = list(prompt_token_ids[-CONTEXT:])
        self._read = len(self._ids)
        self._known = len(self._decode(self._ids))  # characters of the context
        self._base = ""  # text up to `_read`

    def push(self, token_ids: Sequence[int], first_checked: int = 0) -> tuple[int, str | None]:
        """Adds a block; returns how many of its tokens the response keeps and the stop string that
        ended it, if any.

        Stop strings that are complete before token `first_checked` of the block do not count. On a
        stop the text is cut before the stop string (after it with include_stop_str_in_output); the
        token completing it is kept."""
        total = len(token_ids)
        if not self._stops or first_checked >= total:
            self._extend(token_ids)
            return total, None
        if first_checked > 0:
            self._extend(token_ids[:first_checked])
        start = max(first_checked, 0)
        state = (self.text, self._ids, self._read, self._known, self._base)
        whole = self._extend(token_ids[start:])
        if self._find(whole, len(state[0])) is None:
            return total, None
        self.text, self._ids, self._read, self._known, self._base = state
        for used in range(start, total):  # which token completes it?
            before = len(self.text)
            self._extend(token_ids[used : used + 1])
            hit = self._find(self.text, before)
            if hit is not None:
                place, stop = hit
                end = place + len(stop) if self._include_stop else place
                self.text = self.text[:end]
                self._stopped = True
                return used + 1, stop
        return total, None

    def finish(self) -> str:
        """The final text; bytes that never became a character show as U+FFFD."""
        if not self._stopped:
            self._stopped = True
            self.text = self._base + self._decode(self._ids)[self._known :]
        return self.text

    def take(self) -> str:
        """The text that is new since the last call and can no longer turn out to be part of a stop
        string."""
        end = len(self.text) if self._stopped else max(self._sent, len(self.text) - self._held)
        new, self._sent = self.text[self._sent : end], end
        return new

    def _extend(self, token_ids: Sequence[int]) -> str:
        """Adds tokens; returns the text with any half-decoded character still in it."""
        self._ids = [*self._ids, *token_ids]
        decoded = self._decode(self._ids)
        stable = decoded.rstrip(REPLACEMENT)
        whole = self._base + decoded[self._known :]
        self.text = whole if stable == decoded else self._base + stable[self._known :]
        if (
            stable == decoded and len(decoded) > self._known
        ):  # ends on a character: forget what lies before the block
            self._base = self.text
            self._ids = self._ids[self._read :]
            self._read = len(self._ids)
            self._known = len(self._decode(self._ids))
        return whole

    def _find(self, text: str, checked: int) -> tuple[int, str] | None:
        """The first stop string that ends after the first `checked` characters: (where it starts,
        which)."""
        hits = [(text.find(stop, max(0, checked - len(stop) + 1)), stop) for stop in self._stops]
        return min((hit for hit in hits if hit[0] >= 0), key=lambda hit: hit[0], default=None)

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(
            token_ids, skip_special_tokens=self._skip_special, clean_up_tokenization_spaces=False
        )


def full_text(
    tokenizer: Any,
    prompt_token_ids: Sequence[int],
    token_ids: Sequence[int],
    params: SamplingParams,
) -> str:
    """The text of a finished response that needed no detokenizer on the way."""
    detokenizer = Detokenizer(tokenizer, prompt_token_ids, params)
    detokenizer._extend(token_ids)
    return detokenizer.finish()
