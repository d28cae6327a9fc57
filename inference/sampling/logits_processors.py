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

from inference.sampling.penalties import TokenCounts, penalise
from inference.sampling_params import SamplingParams
from speculators.precision import on_device

FORBIDDEN = -torch.inf


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
        self._bad_tokens = sorted({word[0] for word in bad_words if len(word) == 1})
        self._bad_sequences = [list(word) for word in bad_words if len(word) > 1]
        penalised = (
            params.repetition_penalty,
            params.frequency_penalty,
            params.presence_penalty,
        ) != (1, 0, 0)
        self.counts = (
            TokenCounts(prompt_token_ids if params.repetition_penalty != 1 else [])
            if penalised
            else None
        )
        self._counted = self._start  # tokens of the text that are in the counts
        self.forbids = bool(params.allowed_token_ids or bad_words)  # perhaps every token
        self._always = bool(self.forbids or params.logit_bias or penalised)
        self._tensors: _Tensors | None = None

    def active(self, length: int) -> bool:
        """True if logits after a text of so many tokens are changed."""
        return self._always or (
            bool(self._stop_ids) and length < self._start + self.params.min_tokens
        )

    def mask_and_bias(
        self, logits: Tensor, token_ids: Sequence[int], paths: Sequence[Sequence[int]]
    ) -> None:
        """Changes logits [P, V] in place by everything but penalties. Waits for no device."""
        if self._tensors is None:
            self._tensors = _Tensors(self.params, logits.shape[-1], logits.device)
        self._mask(logits, token_ids, paths, self._tensors.not_allowed)
        if self.params.logit_bias:
            logits[:, self._tensors.biased] += self._tensors.biases

    def token_counts(self, token_ids: Sequence[int]) -> TokenCounts | None:
        """Counts of the committed text, which has grown to `token_ids`; None without penalties."""
        if self.counts is not None and len(token_ids) > self._counted:
            self.counts.add(token_ids[self._counted :])
            self._counted = len(token_ids)
        return self.counts

    def _mask(
        self,
        logits: Tensor,
        token_ids: Sequence[int],
        paths: Sequence[Sequence[int]],
        not_allowed: Tensor | None,
    ) -> None:
        """Whatever forbids a token writes the same value, so that order does not matter among
        these."""
        if not_allowed is not None:
            logits.masked_fill_(not_allowed, FORBIDDEN)
        one_by_one = [(place, token) for place in range(len(paths)) for token in self._bad_tokens]
        if self._bad_sequences:
            one_by_one += self._last_tokens(token_ids, paths)
        if self._stop_ids:
            still = self._start + self.params.min_tokens - len(token_ids)
            early = [place for place, path in enumerate(paths) if len(path) < still]
            one_by_one += [(place, token) for place in early for token in self._stop_ids]
        if one_by_one:
            logits[on_device(one_by_one, logits.device).unbind(1)] = FORBIDDEN

    def _last_tokens(
        self, token_ids: Sequence[int], paths: Sequence[Sequence[int]]
    ) -> Iterator[tuple[int, int]]:
        """(place, token) of each bad sequence whose beginning ends the output."""
        longest = max(len(word) for word in self._bad_sequences) - 1
        written = list(token_ids[max(self._start, len(token_ids) - longest) :])
        for place, path in enumerate(paths):
            tail = written + list(path)
            for *beginning, last in self._bad_sequences:
                if tail[-len(beginning) :] == beginning:
                    yield place, last


class _Tensors:
    """A request's own tensors, on the device of its logits from the first round on."""

    def __init__(self, params: SamplingParams, vocab_size: int, device: torch.device) -> None:
        bias = params.logit_bias or {}
        self.not_allowed: Tensor | None = None  # [V]
        if params.allowed_token_ids:
            self.not_allowed = torch.ones(vocab_size, dtype=torch.bool, device=device)
            self.not_allowed[on_device(list(params.allowed_token_ids), device)] = False
        self.biased = on_device(list(bias), device)
        self.biases = on_device(list(bias.values()), device, torch.float32)


def apply_processors(
    logits: Tensor,
    rows: Sequence[int],
    processors: Sequence[RequestProcessors],
    texts: Sequence[Sequence[int]],
    paths: Sequence[Sequence[Sequence[int]]],
) -> None:
    """Changes logits [B, T, V] in place: place j of row rows[i] follows the committed text texts[i]
    and paths[i][j].

    Places beyond len(paths[i]) stay as they are. Waits for no device.
    """
    penalised = []
    for i, row in enumerate(rows):
        processors[i].mask_and_bias(logits[row, : len(paths[i])], texts[i], paths[i])
        if (counts := processors[i].token_counts(texts[i])) is not None:
            penalised.append((row, processors[i].params, counts, paths[i]))
    if penalised:
        penalise(logits, *zip(*penalised, strict=True))


def bad_word_ids(tokenizer: Any, words: Sequence[str]) -> list[list[int]]:
    """Each word as the tokens it is written with: at the start of a text, and after a blank where
    that is as long and begins with another token (vLLM's rule)."""
    found: list[list[int]] = []
    for word in words:
        bare, spaced = (
            list(tokenizer(prefix + word.lstrip(), add_special_tokens=False).input_ids)
            for prefix in ("", " ")
        )
        found += [bare] if bare else []
        if spaced and len(spaced) == len(bare) and spaced[0] != bare[0]:
            found.append(spaced)
    return found
