"""Log-probabilities of the tokens that were written, and of the most probable ones in their places.

Of the model's own distribution, before temperature, filters and processors (vLLM's raw_logprobs).
Each token's is read where it was decided: in the logits of its own place in the verification, which
are those without drafting."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from draftsmith.inference.outputs import TokenLogprobs
from draftsmith.inference.spec_decode.proposal import Proposal
from draftsmith.speculators.precision import on_device

if TYPE_CHECKING:
    from draftsmith.inference.requests.request import Request


def record_logprobs(
    logits: Tensor,
    proposal: Proposal,
    requests: Sequence[Request],
    new_tokens: Sequence[Sequence[int]],
) -> None:
    """Logits [B, T, V] as the model gave them -> `request.logprobs`, for the rows that ask."""
    by_count: dict[int, list[int]] = {}  # rows that ask for as many are read together
    for row, request in enumerate(requests):
        if request.params.logprobs is not None:
            by_count.setdefault(request.params.logprobs, []).append(row)
    for count, rows in by_count.items():
        where = []
        for row in rows:
            place_of = {tuple(path): place for place, path in enumerate(proposal.paths(row))}
            where += [
                (row, place_of[tuple(new_tokens[row][:i])]) for i in range(len(new_tokens[row]))
            ]
        written = [token for row in rows for token in new_tokens[row]]
        entries = iter(_logprobs(logits[on_device(where, logits.device).unbind(1)], written, count))
        for row in rows:
            requests[row].logprobs += islice(entries, len(new_tokens[row]))


def _logprobs(logits: Tensor, token_ids: Sequence[int], count: int) -> list[TokenLogprobs]:
    """Logits [N, V], the token that stands at each place, and how many more (-1: all) -> one entry
    per place."""
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    chosen = logprobs.gather(-1, on_device(token_ids, logits.device).unsqueeze(-1))  # [N, 1]
    ranks = (logprobs >= chosen).sum(-1, keepdim=True)
    best = logprobs.topk(logprobs.shape[-1] if count == -1 else count, dim=-1)
    # one copy from the device: float64 holds all of it exactly
    packed = torch.cat(
        [ranks.double(), best.indices.double(), chosen.double(), best.values.double()], dim=-1
    ).tolist()
    more = best.indices.shape[-1]
    return [
        TokenLogprobs([token, *map(int, row[1 : 1 + more])], row[1 + more :], int(row[0]))
        for token, row in zip(token_ids, packed, strict=True)
    ]
