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
from inference.spec_decode.proposal import Kept, Proposal
from speculators.errors import DraftsmithError
from speculators.precision import on_device
from speculators.vocab.draft_vocab import scatter_to_target


def process_logits(logits: Tensor, proposal: Proposal, requests: Sequence[Request]) -> Tensor:
    """Logits [B, T, V] of a verification -> those that p is made of, in float32 where any row
    changes them.

    In place, unless a row reports log-probabilities and so needs them as they were. DraftsmithError
    if a request's parameters leave no token to write next."""
    active = [
        row
        for row, request in enumerate(requests)
        if request.processors.active(len(request.token_ids))
    ]
    if not active:
        return logits
    keep = any(request.params.logprobs is not None for request in requests)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=keep)
    paths = {row: proposal.paths(row) for row in active}
    chosen = [requests[row] for row in active]
    texts = [request.token_ids for request in chosen]
    apply_processors(
        logits, active, [request.processors for request in chosen], texts, list(paths.values())
    )
    forbidding = [row for row in active if requests[row].processors.forbids]
    if forbidding:  # the device is waited for once, for all of them
        nothing_left = torch.stack(
            [logits[row].amax(-1) == FORBIDDEN for row in forbidding]
        ).tolist()
        for row, empty in zip(forbidding, nothing_left, strict=True):
            _note_dead_ends(requests[row], logits[row], paths[row], empty)
    return logits


def _note_dead_ends(
    request: Request, logits: Tensor, paths: Sequence[Sequence[int]], empty: Sequence[bool]
) -> None:
    """Notes the positions of one row, logits [T, V], where every token is forbidden."""
    places = [place for place in range(len(paths)) if empty[place]]
    request.processors.dead_ends = {tuple(paths[place]) for place in places}
    if () in request.processors.dead_ends:
        names = ("structured_outputs", "allowed_token_ids", "bad_words", "min_tokens")
        asked = [name for name in names if getattr(request.params, name) not in (None, (), 0)]
        written = len(request.token_ids) - request.num_prompt_tokens
        raise DraftsmithError(
            f"request {request.request_id}: after {written} tokens of output {' and '.join(asked)}"
            " forbid every token; ask for less"
        )
    for place in places:
        logits[place] = 0.0  # anything finite: what is drawn there is cut off by `cut_at_dead_ends`


def cut_at_dead_ends(requests: Sequence[Request], kept: Sequence[Kept]) -> None:
    """Drops what was chosen where no token was allowed. The text before it stays, and if it has not
    ended there, the next round finds the same at its first place and says so, as it would have done
    without drafting."""
    for request, each in zip(requests, kept, strict=True):
        if request.processors.dead_ends:
            for length in range(1, len(each.tokens)):
                if tuple(each.tokens[:length]) in request.processors.dead_ends:
                    del each.tokens[length:], each.places[length - 1 :]
                    break
            request.processors.dead_ends = set()


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
        empty = places.amax(-1, keepdim=True) == FORBIDDEN
        processed[own] = torch.where(empty, processed[own], places)
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
