"""Logits at the places of a proposal, of a batch: those of the verification, and those of a
drafter.

What a request changes in them is in `sampling/logits_processors.py`. A place is known by its path,
the drafted tokens that lead to it, so chains and trees are the same here."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from inference.requests.request import Request
from inference.sampling.logits_processors import FORBIDDEN, apply_processors
from inference.spec_decode.proposal import Proposal
from speculators.precision import on_device
from speculators.vocab.draft_vocab import scatter_to_target


def process_logits(logits: Tensor, proposal: Proposal, requests: Sequence[Request]) -> Tensor:
    """Logits [B, T, V] of a verification -> those that p is made of, in float32 where any row
    changes them.

    In place, unless a row reports log-probabilities and so needs them as they were. A place at
    which a request's parameters leave no token keeps its logits."""
    active = [
        row
        for row, request in enumerate(requests)
        if request.processors.active(len(request.token_ids))
    ]
    if not active:
        return logits
    keep = any(request.params.logprobs is not None for request in requests)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=keep)
    chosen = [requests[row] for row in active]
    forbidding = [row for row in active if requests[row].processors.forbids]
    before = [logits[row].clone() for row in forbidding]
    apply_processors(
        logits,
        active,
        [request.processors for request in chosen],
        [request.token_ids for request in chosen],
        [proposal.paths(row) for row in active],
    )
    for row, unchanged in zip(forbidding, before, strict=True):
        logits[row] = _unless_empty(logits[row], unchanged)
    return logits


def _unless_empty(processed: Tensor, unchanged: Tensor) -> Tensor:
    """`processed` [..., V], and `unchanged` where every token of it is forbidden."""
    empty = processed.amax(-1, keepdim=True) == FORBIDDEN
    return torch.where(empty, unchanged, processed)


def process_draft_logits(
    logits: Tensor,
    requests: Sequence[Request],
    paths: Sequence[Sequence[Sequence[int]]],
    draft_to_target: Tensor | None,
    vocab_size: int,
) -> Tensor:
    """A drafter's logits [b, P, V_draft], place j of row b following its text and paths[b][j] ->
    the same, processed.

    A place at which nothing is left keeps its logits: what is drafted there will be rejected.
    """
    processed = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
    active = [
        row
        for row, request in enumerate(requests)
        if request.processors.active(len(request.token_ids))
    ]
    if active:
        # forbidden tokens are those of the target's vocabulary; the values of other tokens are not
        # read
        own = on_device(active, logits.device)
        places = scatter_to_target(processed[own], draft_to_target, vocab_size)
        chosen = [requests[row] for row in active]
        texts, wanted = [request.token_ids for request in chosen], [paths[row] for row in active]
        apply_processors(
            places, range(len(active)), [request.processors for request in chosen], texts, wanted
        )
        if draft_to_target is not None:
            places = places[..., draft_to_target]
        processed[own] = _unless_empty(places, processed[own])
    return processed


def process_chain_logits(
    logits: Tensor,
    requests: Sequence[Request],
    drafted: Sequence[Tensor],
    draft_to_target: Tensor | None,
    vocab_size: int,
) -> Tensor:
    """Processes the draft logits [b, V_draft] of the depth after the tokens `drafted` ([b] per
    depth), if any request asks for it."""
    if not any(request.processors.active(len(request.token_ids)) for request in requests):
        return logits
    chains = torch.stack(list(drafted), dim=1).tolist() if drafted else [[] for _ in requests]
    paths = [[chain] for chain in chains]
    return process_draft_logits(
        logits.unsqueeze(1), requests, paths, draft_to_target, vocab_size
    ).squeeze(1)
