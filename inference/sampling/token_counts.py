"""How often each token is in a text, kept as the text grows: what penalties are computed from. Sparse: only tokens
that occur have an entry, so that a penalty costs what the text has in it and not what the vocabulary has."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from speculators.host_copy import on_device


class TokenCounts:
    """Distinct tokens of prompt and output, and how often each is in the output. The prompt's tokens come first."""

    def __init__(self, prompt_token_ids: Sequence[int], device: torch.device) -> None:
        self._slot: dict[int, int] = {}
        self._token_ids = torch.empty(0, dtype=torch.long, device=device)  # [U]
        self._counts = torch.empty(0, device=device)  # [U]
        self._make_slots(prompt_token_ids)
        self._num_prompt = len(self._slot)

    def add(self, token_ids: Sequence[int]) -> None:
        """More of the output."""
        self._make_slots(token_ids)
        slots = on_device([self._slot[token] for token in token_ids], self._counts.device)
        self._counts.index_add_(0, slots, torch.ones_like(slots, dtype=torch.float32))

    def along(self, paths: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor, Tensor]:
        """As if the tokens of each path had been written too: token ids [U], how often each is in the output [P, U],
        and whether it is in prompt or output [P, U]."""
        device, known = self._counts.device, len(self._slot)
        extra: dict[int, int] = {}
        places, slots = [], []
        for place, path in enumerate(paths):
            for token in path:
                slot = self._slot.get(token)
                slots.append(extra.setdefault(token, known + len(extra)) if slot is None else slot)
                places.append(place)
        token_ids = torch.cat([self._token_ids, on_device(list(extra), device)])
        counts = torch.zeros(len(paths), known + len(extra), device=device)
        counts[:, :known] = self._counts
        if slots:
            ones = torch.ones(len(slots), device=device)
            counts.index_put_((on_device(places, device), on_device(slots, device)), ones, accumulate=True)
        seen = counts > 0
        seen[:, : self._num_prompt] = True
        return token_ids, counts, seen

    def _make_slots(self, token_ids: Sequence[int]) -> None:
        fresh = [token for token in dict.fromkeys(token_ids) if token not in self._slot]
        if fresh:
            self._slot.update(zip(fresh, range(len(self._slot), len(self._slot) + len(fresh)), strict=True))
            self._token_ids = torch.cat([self._token_ids, on_device(fresh, self._token_ids.device)])
            self._counts = torch.cat([self._counts, self._counts.new_zeros(len(fresh))])
