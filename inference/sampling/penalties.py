"""Repetition, presence and frequency penalties of a whole batch in a few operations.

Sparse: a penalty costs what the texts have in them and not what the vocabulary has. Counts live on
the host, since tokens are known there; a batch's counts go to the device in one copy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from inference.sampling_params import SamplingParams
from speculators.precision import to_device


class TokenCounts:
    """The distinct tokens of one request's prompt and output, and how often each is in the output.

    A token's slot is its place in `token_ids`. The prompt's tokens have the first `num_prompt`
    slots."""

    def __init__(self, prompt_token_ids: Sequence[int]) -> None:
        self.slots: dict[int, int] = {}
        self.token_ids: list[int] = []  # [U]
        self.times: list[int] = []  # [U]
        for token in dict.fromkeys(prompt_token_ids):
            self._open(token)
        self.num_prompt = len(self.token_ids)

    def add(self, token_ids: Sequence[int]) -> None:
        """Counts tokens that the output has grown by."""
        for token in token_ids:
            self.times[self.slots[token] if token in self.slots else self._open(token)] += 1

    def _open(self, token: int) -> int:
        self.slots[token] = len(self.token_ids)
        self.token_ids.append(token)
        self.times.append(0)
        return self.slots[token]


def along_paths(
    counts: Sequence[TokenCounts], paths: Sequence[Sequence[Sequence[int]]], device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Counts as if the drafted tokens of paths[i][j] had been written after text i.

    Every row has the same number of paths P and at least one token. Returns token ids [R, U], how
    often each is in the output [R, P, U] and whether it is in prompt or output [R, P, U]. A row
    with fewer than U tokens repeats its last one."""
    extra: list[dict[int, int]] = [{} for _ in counts]
    added: list[tuple[int, int, int]] = []  # (row, place, slot)
    for row, (each, row_paths) in enumerate(zip(counts, paths, strict=True)):
        slots, fresh, known = each.slots, extra[row], len(each.token_ids)
        for place, path in enumerate(row_paths):
            for token in path:
                slot = slots.get(token)
                added.append(
                    (
                        row,
                        place,
                        fresh.setdefault(token, known + len(fresh)) if slot is None else slot,
                    )
                )
    sizes = np.array(
        [len(each.token_ids) + len(fresh) for each, fresh in zip(counts, extra, strict=True)]
    )
    U, P = int(sizes.max()), len(paths[0])
    numbers = np.zeros(
        (3, len(counts), U), np.int64
    )  # token ids, times in the committed output, whether in the prompt
    for row, (each, fresh) in enumerate(zip(counts, extra, strict=True)):
        known = len(each.token_ids)
        numbers[0, row, :known], numbers[1, row, :known] = each.token_ids, each.times
        numbers[0, row, known : known + len(fresh)] = list(fresh)
        numbers[2, row, : each.num_prompt] = 1
    token_ids, committed, in_prompt = to_device(torch.from_numpy(numbers), device)
    times = committed.unsqueeze(1).expand(-1, P, -1).float()
    if added:
        where = to_device(torch.tensor(added).T.contiguous(), device)
        times.index_put_(tuple(where), torch.ones(len(added), device=device), accumulate=True)
    seen = (times > 0) | in_prompt.bool().unsqueeze(1)
    if (sizes < U).any():
        slot = to_device(torch.from_numpy(np.minimum(np.arange(U), sizes[:, None] - 1)), device)
        at = slot.unsqueeze(1).expand(-1, P, -1)
        token_ids, times, seen = token_ids.gather(1, slot), times.gather(2, at), seen.gather(2, at)
    return token_ids, times, seen


def penalise(
    logits: Tensor,
    rows: Sequence[int],
    params: Sequence[SamplingParams],
    counts: Sequence[TokenCounts],
    paths: Sequence[Sequence[Sequence[int]]],
) -> None:
    """Changes logits [B, T, V] in place: place j of row rows[i] follows text i and the drafted
    tokens paths[i][j].

    The definitions of CTRL (1909.05858; by sign, as in vLLM) and of OpenAI's API.
    """
    kept = [i for i in range(len(rows)) if counts[i].token_ids or any(paths[i])]
    if not kept:
        return
    P = max(len(paths[i]) for i in kept)
    # a row with fewer places repeats its last one: the same values are written to it twice
    padded = [[*paths[i], *[paths[i][-1]] * (P - len(paths[i]))] for i in kept]
    token_ids, times, seen = along_paths([counts[i] for i in kept], padded, logits.device)
    place = torch.tensor([[min(j, len(paths[i]) - 1) for j in range(P)] for i in kept])
    where = to_device(
        torch.stack([torch.tensor([rows[i] for i in kept]).unsqueeze(1).expand(-1, P), place]),
        logits.device,
    )
    index = (where[0].unsqueeze(2), where[1].unsqueeze(2), token_ids.unsqueeze(1))
    values = logits[index]  # [R, P, U]
    wanted = [
        (params[i].repetition_penalty, params[i].frequency_penalty, params[i].presence_penalty)
        for i in kept
    ]
    factor, frequency, presence = to_device(
        torch.tensor(wanted, dtype=logits.dtype), logits.device
    ).T[..., None, None]
    repeated = torch.where(values > 0, values / factor, values * factor)
    values = torch.where(seen, repeated, values) - frequency * times - presence * (times > 0)
    logits[index] = values.to(logits.dtype)
