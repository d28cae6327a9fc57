"""A request's changes to its logits before softmax: at every drafted place as if the drafts before
it had been written, so that drafting changes nothing. Also at temperature 0.

In vLLM's order: allowed_token_ids, bad_words, min_tokens, logit_bias, penalties. A place is known
by its path, the drafted tokens that lead to it, so chains and trees are the same here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from draftsmith.inference.sampling_params import SamplingParams
from draftsmith.speculators.precision import on_device

# No probability beside any other token, and yet a number: a drafter that can propose forbidden
# tokens alone has a distribution, too. Requests that forbid every token are refused before.
FORBIDDEN = -1e30


class RequestProcessors:
    """The logits processors of one request. Their counts, a number per token of the vocabulary,
    follow the committed text, which only grows; drafts leave nothing behind."""

    def __init__(
        self,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        stop_ids: Iterable[int],
        bad_words: Sequence[Sequence[int]] = (),
    ) -> None:
        """`bad_words`: token ids, as `bad_word_ids` gives them."""
        self.params = params
        self._prompt = list(prompt_token_ids)
        self._start = len(self._prompt)
        self._stop_ids = sorted(stop_ids) if params.min_tokens else []
        self._bad_words = [list(word) for word in bad_words]
        self._bias: Tensor | None = None  # [V], from the first round on; forbidden tokens as well
        self._counted = self._start  # tokens of the text that are in the counts
        self._times: Tensor | None = None  # [V] float32, how often each token is in the output
        self._prompted: Tensor | None = None  # bool [V], whether it is in the prompt
        penalties = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
        self._penalised = penalties != (1, 0, 0)
        self._biased = bool(params.allowed_token_ids or params.logit_bias)
        self._always = self._biased or self._penalised or bool(bad_words)

    def active(self, length: int) -> bool:
        """True if logits after a text of so many tokens are changed."""
        return self._always or (
            bool(self._stop_ids) and length < self._start + self.params.min_tokens
        )

    def apply(
        self, logits: Tensor, token_ids: Sequence[int], paths: Sequence[Sequence[int]]
    ) -> None:
        """Changes float32 logits [P, V] in place: place j follows the committed text and the
        drafted tokens paths[j]. Waits for no device."""
        if forbidden := list(self._forbidden(token_ids, paths)):
            # a number that is assigned would be uploaded
            forbid = logits.new_full((), FORBIDDEN)
            logits.index_put_(on_device(forbidden, logits.device).unbind(1), forbid)
        if self._biased:
            if self._bias is None:
                self._bias = self._bias_of(logits.shape[1], logits.device)
            logits += self._bias
        if self._penalised:
            self._penalise(logits, token_ids, paths)

    def _bias_of(self, vocab_size: int, device: torch.device) -> Tensor:
        bias = torch.zeros(vocab_size, device=device)
        added = self.params.logit_bias or {}
        if self.params.allowed_token_ids:
            bias.fill_(FORBIDDEN)
            bias.index_fill_(0, on_device(list(self.params.allowed_token_ids), device), 0.0)
        bias[on_device(list(added), device)] += on_device(
            list(added.values()), device, torch.float32
        )
        return bias

    def _forbidden(
        self, token_ids: Sequence[int], paths: Sequence[Sequence[int]]
    ) -> Iterator[tuple[int, int]]:
        """(place, token) of each stop token where min_tokens are not written yet, and of each bad
        word whose beginning ends the output."""
        left = self._start + self.params.min_tokens - len(token_ids)
        longest = max((len(word) - 1 for word in self._bad_words), default=0)
        written = list(token_ids[max(self._start, len(token_ids) - longest) :])
        for place, path in enumerate(paths):
            if len(path) < left:
                yield from ((place, token) for token in self._stop_ids)
            tail = written + list(path)
            for *beginning, last in self._bad_words:
                if tail[len(tail) - len(beginning) :] == beginning:
                    yield place, last

    def _penalise(
        self, logits: Tensor, token_ids: Sequence[int], paths: Sequence[Sequence[int]]
    ) -> None:
        """By the definitions of CTRL (1909.05858; repetition by sign, as in vLLM) and of OpenAI's
        API (frequency, presence)."""
        device = logits.device
        if self._times is None or self._prompted is None:
            self._times = torch.zeros(logits.shape[1], device=device)
            self._prompted = torch.zeros(logits.shape[1], dtype=torch.bool, device=device)
            self._prompted.index_fill_(0, on_device(self._prompt, device), True)
        committed = on_device(token_ids[self._counted :], device)
        self._times.index_add_(0, committed, torch.ones(len(committed), device=device))
        self._counted = len(token_ids)
        times = self._times.repeat(len(paths), 1)  # [P, V]
        drafted = [(place, token) for place, path in enumerate(paths) for token in path]
        if drafted:
            ones = torch.ones(len(drafted), device=device)
            times.index_put_(on_device(drafted, device).unbind(1), ones, accumulate=True)
        written = times > 0
        factor = self.params.repetition_penalty
        repeated = torch.where(logits > 0, logits / factor, logits * factor)
        torch.where(written | self._prompted, repeated, logits, out=logits)
        logits -= self.params.frequency_penalty * times
        logits -= self.params.presence_penalty * written


def bad_word_ids(tokenizer: Any, words: Sequence[str]) -> list[list[int]]:
    """Each word as the tokens it is written with: at the start of a text, and after a blank where
    that is as long and begins with another token (vLLM's rule)."""
    spellings: list[list[int]] = []
    for word in words:
        bare, spaced = (
            list(tokenizer(prefix + word.lstrip(), add_special_tokens=False).input_ids)
            for prefix in ("", " ")
        )
        spellings += [bare] if bare else []
        if spaced and len(spaced) == len(bare) and spaced[0] != bare[0]:
            spellings.append(spaced)
    return spellings
