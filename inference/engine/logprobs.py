"""Log-probabilities of the tokens that were written, and of the most probable ones in their places.

Of the model's own distribution, before temperature, filters and processors (vLLM's raw_logprobs),
at the place of the verification where the token was decided."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from draftsmith.inference.outputs import Logprob, SampleLogprobs
from draftsmith.inference.spec_decode.proposal import Kept
from draftsmith.speculators.precision import on_device

if TYPE_CHECKING:
    from draftsmith.inference.requests.request import Request


def record_logprobs(logits: Tensor, requests: Sequence[Request], kept: Sequence[Kept]) -> None:
    """Logits [B, T, V] as the model gave them -> `request.logprobs`, for the rows that ask."""
    by_count: dict[int, list[int]] = {}  # rows that ask for as many are read together
    for row, request in enumerate(requests):
        if request.params.logprobs is not None:
            by_count.setdefault(request.params.logprobs, []).append(row)
    for count, rows in by_count.items():
        # a token was decided after its parent: the committed text, or the draft before it
        places = [(row, 1 + node) for row in rows for node in (-1, *kept[row].nodes)]
        tokens = [token for row in rows for token in kept[row].tokens]
        entries = iter(_logprobs(logits[on_device(places, logits.device).unbind(1)], tokens, count))
        for row in rows:
            requests[row].logprobs += islice(entries, len(kept[row].tokens))


def _logprobs(logits: Tensor, token_ids: Sequence[int], count: int) -> SampleLogprobs:
    """Logits [N, V], the token that stands at each place, and how many more (-1: all) -> one entry
    per place."""
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    chosen = logprobs.gather(-1, on_device(token_ids, logits.device).unsqueeze(-1))  # [N, 1]
    ranks = (logprobs >= chosen).sum(-1, keepdim=True)
    best = logprobs.topk(logprobs.shape[-1] if count == -1 else count, dim=-1)
    # one copy from the device: float64 holds all of it exactly
    parts = (ranks.double(), chosen.double(), best.indices.double(), best.values.double())
    entries = []
    for token, (rank, logprob_of_token, *more) in zip(
        token_ids, torch.cat(parts, dim=-1).tolist(), strict=True
    ):
        entry = {token: Logprob(logprob_of_token, int(rank))}
        others = zip(more[: len(more) // 2], more[len(more) // 2 :], strict=True)
        for place, (other, logprob) in enumerate(others, 1):
            entry[int(other)] = Logprob(logprob, place)
        entries.append(entry)
    return entries
