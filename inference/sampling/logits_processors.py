"""A request's changes to its logits before softmax: at every drafted place as if the drafts before
it had been written, so that drafting changes nothing. Also at temperature 0.

In vLLM's order: allowed_token_ids, bad_words, min_tokens, logit_bias, penalties;
temperature and filters are `sampler.py`'s. A place is known by its path, the drafted tokens that
lead to it, so chains and trees are the same here. A batch, and a drafter's logits, are
`spec_decode/logits.py`'s."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from draftsmith.inference.sampling.penalties import Penalties
from draftsmith.inference.sampling_params import SamplingParams
from draftsmith.speculators.precision import on_device

# No probability beside any other token, and yet a number: a drafter that can propose forbidden
# tokens alone has a distribution, too. Requests that forbid every token are refused before.
FORBIDDEN = -1e30


class RequestProcessors:
    """The logits processors of one request, with the state they keep of its text.

    Its memory follows the committed text it is shown, which only grows; drafts leave nothing
    behind."""

    def __init__(
        self,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        stop_ids: Iterable[int],
        bad_words: Sequence[Sequence[int]] = (),
    ) -> None:
        """`bad_words`: token ids, as `bad_word_ids` gives them."""
        self.params = params
        self._start = len(prompt_token_ids)
        self._stop_ids = sorted(stop_ids) if params.min_tokens else []
        self._bad_words = [list(word) for word in bad_words]
        self._bias: Tensor | None = None  # [V], from the first round on; forbidden tokens as well
        penalties = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
        self._penalties = Penalties(params, prompt_token_ids) if penalties != (1, 0, 0) else None
        self._biased = bool(params.allowed_token_ids or params.logit_bias)
        self._always = self._biased or bool(bad_words) or self._penalties is not None

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
        forbidden = [*self._ends_of_bad_words(token_ids, paths), *self._early(token_ids, paths)]
        if forbidden:
            logits[on_device(forbidden, logits.device).unbind(1)] = FORBIDDEN
        if self._biased:
            if self._bias is None:
                self._bias = self._bias_of(logits.shape[1], logits.device)
            logits += self._bias
        if self._penalties is not None:
            self._penalties.apply(logits, token_ids, paths)

    def _bias_of(self, vocab_size: int, device: torch.device) -> Tensor:
        bias, added = torch.zeros(vocab_size, device=device), self.params.logit_bias or {}
        if self.params.allowed_token_ids:
            bias.fill_(FORBIDDEN)
            bias[on_device(list(self.params.allowed_token_ids), device)] = 0.0
        bias[on_device(list(added), device)] += on_device(
            list(added.values()), device, torch.float32
        )
        return bias

    def _early(
        self, token_ids: Sequence[int], paths: Sequence[Sequence[int]]
    ) -> Iterator[tuple[int, int]]:
        """(place, token) of each stop token where min_tokens are not written yet."""
        left = self._start + self.params.min_tokens - len(token_ids)
        for place, path in enumerate(paths):
            if len(path) < left:
                yield from ((place, token) for token in self._stop_ids)

    def _ends_of_bad_words(
        self, token_ids: Sequence[int], paths: Sequence[Sequence[int]]
    ) -> Iterator[tuple[int, int]]:
        """(place, token) of each bad word whose beginning ends the output."""
        longest = max((len(word) - 1 for word in self._bad_words), default=0)
        written = list(token_ids[max(self._start, len(token_ids) - longest) :])
        for place, path in enumerate(paths):
            tail = written + list(path)
            for *beginning, last in self._bad_words:
                if tail[len(tail) - len(beginning) :] == beginning:
                    yield place, last


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
