"""Repetition, presence and frequency penalties of one request, by the definitions of CTRL
(1909.05858; by sign, as in vLLM) and of OpenAI's API.

Counts are dense, a number per token of the vocabulary, on the device of the logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftsmith.inference.sampling_params import SamplingParams
from draftsmith.speculators.precision import on_device


class Penalties:
    def __init__(self, params: SamplingParams, prompt_token_ids: Sequence[int]) -> None:
        self._params = params
        self._prompt = list(prompt_token_ids)
        self._counted = len(self._prompt)  # tokens of the text that are in the counts
        self._times: Tensor | None = None  # [V] float32, how often each token is in the output
        self._prompted: Tensor | None = None  # bool [V], whether it is in the prompt

    def apply(
        self, logits: Tensor, token_ids: Sequence[int], paths: Sequence[Sequence[int]]
    ) -> None:
        """Changes logits [P, V] in place: place j follows the committed text, which only grows
        from call to call, and the drafted tokens paths[j]."""
        device = logits.device
        if self._times is None or self._prompted is None:
            self._times = torch.zeros(logits.shape[1], device=device)
            self._prompted = torch.zeros(logits.shape[1], dtype=torch.bool, device=device)
            self._prompted[on_device(self._prompt, device)] = True
        committed = on_device(token_ids[self._counted :], device)
        self._times.index_add_(0, committed, torch.ones(len(committed), device=device))
        self._counted = len(token_ids)
        times = self._times.repeat(len(paths), 1)  # [P, V]
        drafted = [(place, token) for place, path in enumerate(paths) for token in path]
        if drafted:
            ones = torch.ones(len(drafted), device=device)
            times.index_put_(on_device(drafted, device).unbind(1), ones, accumulate=True)
        written, factor = times > 0, self._params.repetition_penalty
        repeated = torch.where(logits > 0, logits / factor, logits * factor)
        torch.where(written | self._prompted, repeated, logits, out=logits)
        logits -= self._params.frequency_penalty * times
        logits -= self._params.presence_penalty * written
