"""Verification rules for trees of drafts: which path of each row is kept.

p [B, 1+K, V] are the target's distributions: entry 0 after the committed text, entry 1+k after
node k. Like q they come after every processor. A chain is a tree of width one.

- `follow`: the target's own token decides at every node (temperature 0, `sample_match`).
- `traverse`: traversal verification of sampled drafts.

The random numbers are arguments: `rejection_sampler.py` draws them, the tests enumerate them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from draftsmith.inference.spec_decode.proposal import Proposal
from draftsmith.speculators.precision import on_device

ROOT = -1


def follow(proposal: Proposal, target_ids: Tensor) -> list[tuple[list[int], int]]:
    """Walks each row as far as the tree holds the target's own tokens.

    target_ids [B, 1+K]: the token that the target takes after each node, greedily or drawn from p.
    Returns per row (accepted nodes, the target's token after them). Whatever was drafted, the text
    is the target's own: a seed gives the same text with and without drafts."""
    walks = []
    for row, target_row in enumerate(target_ids.tolist()):
        children = proposal.children(row)
        drafted = proposal.drafted[row]
        path: list[int] = []
        node: int | None = ROOT
        while node is not None:
            token = target_row[1 + node]
            matches = [child for child in children.get(node, ()) if drafted[child] == token]
            node = matches[0] if matches else None
            path += matches[:1]
        walks.append((path, token))
    return walks


# ---------------------------------------------------------------------- traversal verification

Flip = Callable[[float], bool]  # True with the given probability


class _Rejected(NamedTuple):
    """A rejected draft, whose share is to be taken out of the distributions at its parent.

    following  the sibling that is tried next; the draft itself if there is none
    rate       the probability that the parent is accepted if nothing behind it is"""

    draft: int
    parent: int
    following: int
    rate: float


# yields rejected drafts; receives the mass left of p, and p / q of the draft that follows
_TreeWalk = Generator[_Rejected, tuple[float, float], list[int]]


def traverse(p: Tensor, proposal: Proposal, flips: Sequence[Flip]) -> list[list[int]]:
    """Traversal verification (Weng et al. 2505.12398) of all rows side by side: from the leaves up,
    a path that is rejected gives what it had to its siblings, and then to its parent.

    Siblings are drawn one after the other without replacement. On a chain it is the block rule.
    Returns the accepted nodes of each row. p and proposal.q are overwritten: p[b, 1 + last node]
    is then the distribution of the token that follows. A row takes a flip per draft it tries; the
    device is waited for once per step, however many rows there are."""
    walks = [
        _walk(proposal.children(row), ratios, flip)
        for row, (ratios, flip) in enumerate(zip(_ratios(p, proposal), flips, strict=True))
    ]
    paths: list[list[int]] = [[] for _ in walks]
    answers: dict[int, tuple[float, float] | None] = dict.fromkeys(range(len(walks)))
    while answers:
        rejected: dict[int, _Rejected] = {}
        for row, answer in answers.items():
            try:
                rejected[row] = walks[row].send(answer)  # type: ignore[arg-type]
            except StopIteration as end:
                paths[row] = end.value
        answers = dict(_take_out(p, proposal, rejected)) if rejected else {}
    return paths


def _walk(children: dict[int, list[int]], ratios: list[float], flip: Flip) -> _TreeWalk:
    """The walk of one row, without its distributions; ratios [K]: p / q of every draft before any
    of its siblings was tried. Returns the accepted nodes."""
    ratios = list(ratios)
    untried = {node: list(below) for node, below in children.items()}
    # from the root to where the walk stands
    path = [ROOT]
    rates = [1.0]
    while True:
        while untried.get(path[-1]):  # down to the first leaf
            child = untried[path[-1]][0]
            rates.append(min(1.0, rates[-1] * ratios[child]))
            path.append(child)
        if path[-1] == ROOT or flip(rates[-1]):
            return path[1:]
        draft = path.pop()
        rates.pop()
        siblings = untried[path[-1]]
        siblings.pop(0)
        following = siblings[0] if siblings else draft
        mass, ratios[following] = yield _Rejected(draft, path[-1], following, rates[-1])
        if path[-1] != ROOT:
            below = mass + 1 - rates[-1]
            rates[-1] = mass / below if below > 0 else 1.0


def _take_out(
    p: Tensor, proposal: Proposal, rejected: dict[int, _Rejected]
) -> list[tuple[int, tuple[float, float]]]:
    """Writes what a rejected draft leaves: of p to its parent's entry, of q to the sibling that
    follows. Returns per row the mass left of p, and p / q of that sibling."""
    q = proposal.q
    assert q is not None  # see `rejection_sampler.rule_for`
    places = [(row, 1 + one.parent, one.draft, one.following) for row, one in rejected.items()]
    rows, parents, drafts, following = on_device(places, p.device).unbind(1)
    rates = on_device([rejection.rate for rejection in rejected.values()], p.device, p.dtype)
    drawn_from = q[rows, drafts]  # [n, V]
    left, mass = _residual(p[rows, parents], drawn_from, rates.unsqueeze(1))
    remaining = _without(drawn_from, proposal.token_ids[rows, drafts].unsqueeze(1))
    p[rows, parents] = left
    q[rows, following] = remaining
    at = proposal.token_ids[rows, following].unsqueeze(1)
    numbers = torch.cat([mass, left.gather(1, at), remaining.gather(1, at)], dim=1).tolist()
    return [
        (row, (total, _ratio(above, below)))
        for row, (total, above, below) in zip(rejected, numbers, strict=True)
    ]


def _residual(p: Tensor, q: Tensor, rates: Tensor) -> tuple[Tensor, Tensor]:
    """norm((rate p - q)+) [n, V], and the mass before it was normalised [n, 1].

    p itself where nothing is left: p and q are then the same to the last bit, and nothing could be
    rejected but by rounding."""
    left = (rates * p - q).clamp_(min=0)
    mass = left.sum(-1, keepdim=True)
    return torch.where(mass > 0, left / mass, p), mass


def _without(q: Tensor, tokens: Tensor) -> Tensor:
    """q [n, V] once tokens [n, 1] are drawn and not put back. All zero if it was the last one."""
    q = q.scatter(1, tokens, 0.0)
    total = q.sum(-1, keepdim=True)
    return torch.where(total > 0, q / total, q)


def _ratios(p: Tensor, proposal: Proposal) -> list[list[float]]:
    """p / q of every draft before any of its siblings was tried: [B, K]."""
    q = proposal.q
    width = proposal.width
    if q is None or not width:
        return [[] for _ in proposal.counts]
    parents = [
        [1 + parent for parent in proposal.parents_of(row)] + [0] * (width - count)
        for row, count in enumerate(proposal.counts)
    ]
    rows = torch.arange(len(p), device=p.device).unsqueeze(1)
    above = p[rows, on_device(parents, p.device), proposal.token_ids]  # [B, K]
    below = q.gather(-1, proposal.token_ids.unsqueeze(-1)).squeeze(-1).to(p.dtype)
    return [[_ratio(*pair) for pair in row] for row in torch.stack([above, below], dim=-1).tolist()]


def _ratio(p: float, q: float) -> float:
    """p / q of one token; 0 where q is 0, which cannot have been drawn."""
    return p / q if q > 0 else 0.0
