"""Rounds as clients read them: every token with its text. Knows tokenizers and the protocol; no engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from inference.outputs import CompletionOutput, Placed
from inference.requests.detokenizer import Detokenizer
from inference.sampling_params import SamplingParams
from inference.server.api.protocol_responses import Round, RoundToken


class RoundTexts:
    """Of one response. The texts of its committed tokens are, one after the other, what the response says: a token
    that ends within a character has none, and the one that completes it has all of it. (Stop strings and stop tokens
    are among them, and are not in the response.) `alone`: the text of a token by itself."""

    def __init__(
        self, tokenizer: Any, alone: Callable[[int], str], prompt_token_ids: Sequence[int], skip_special_tokens: bool
    ) -> None:
        self._alone = alone
        params = SamplingParams(skip_special_tokens=skip_special_tokens)
        self._detokenizer = Detokenizer(tokenizer, prompt_token_ids, params)

    def rounds(self, completion: CompletionOutput) -> list[Round]:
        """Of a piece of a stream that has `rounds`."""
        written = [
            Round(
                tokens=[self._committed(each) for each in judged.tokens],
                rejected=[self._rejected(each) for each in judged.rejected],
                num_draft_tokens=judged.num_draft_tokens,
            )
            for judged in completion.rounds or ()
        ]
        if completion.finish_reason is not None and written:
            self._detokenizer.finish()
            written[-1].tokens[-1].text += self._detokenizer.take()
        return written

    def _committed(self, placed: Placed) -> RoundToken:
        token, position = placed
        self._detokenizer.push([token])
        return RoundToken(token_id=token, text=self._detokenizer.take(), position=position)

    def _rejected(self, placed: Placed) -> RoundToken:
        token, position = placed
        return RoundToken(token_id=token, text=self._alone(token), position=position)
