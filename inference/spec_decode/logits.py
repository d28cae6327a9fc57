"""Logits at the places of a proposal, of a batch: those of the verification, and those of a
drafter.

What a request changes in them is in `sampling/logits_processors.py`. A place is known by its path,
the drafted tokens that lead to it, so chains and trees are the same here."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftsmith.inference.requests.request import Request
from draftsmith.inference.spec_decode.proposal import Proposal
from draftsmith.speculators.vocab.draft_vocab import scatter_to_target


def active_rows(requests: Sequence[Request]) -> list[int]:
    """The rows whose logits are changed."""
    rows = enumerate(requests)
    return [row for row, one in rows if one.processors.active(len(one.token_ids))]


def process_logits(logits: Tensor, proposal: Proposal, requests: Sequence[Request]) -> Tensor:
    """Logits [B, T, V] of a verification -> those that p is made of, in float32 where any row
    changes them.

    In place, unless a row reports log-probabilities and so needs them as they were."""
    rows = active_rows(requests)
    if not rows:
        return logits
    keep = any(request.params.logprobs is not None for request in requests)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=keep)
    for row in rows:
        request = requests[row]
        paths = proposal.paths(row)
        request.processors.apply(logits[row, : len(paths)], request.token_ids, paths)
    return logits


def process_draft_logits(
    logits: Tensor,
    requests: Sequence[Request],
    paths: Sequence[Sequence[Sequence[int]]],
    draft_to_target: Tensor | None,
    vocab_size: int,
) -> Tensor:
    """A drafter's logits [b, P, V_draft], place j of row b following its text and paths[b][j] ->
    the same, processed. Where every token that can be drafted is forbidden all are alike: what is
    drafted there will be rejected."""
    processed = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
    for row in active_rows(requests):
        request = requests[row]
        # the values of tokens that cannot be drafted are not read
        full = scatter_to_target(processed[row], draft_to_target, vocab_size)
        request.processors.apply(full, request.token_ids, paths[row])
        if draft_to_target is not None:
            processed[row] = full[:, draft_to_target]
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
    if not active_rows(requests):
        return logits
    chains = torch.stack(list(drafted), dim=1).tolist() if drafted else [[] for _ in requests]
    vocabularies = draft_to_target, vocab_size
    paths = [[chain] for chain in chains]
    return process_draft_logits(logits[:, None], requests, paths, *vocabularies)[:, 0]
