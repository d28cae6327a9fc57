"""What is kept of a tree of drafts: walks from the root that throw the dice they are handed, and know no other.

A rule is one function in TREE_RULES: (p [1+K, V], the row's tree, dice) -> (places kept, the target's own token).
p[0] is the target's distribution after the committed text, p[1+k] that after place k; like q they come after every
processor. A chain is a tree of width one. With dice that enumerate every outcome a rule is proved exactly; with
those of `rejection_sampler` it runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from inference.proposal import Proposal
from inference.sampler import argmax

ROOT = -1


class Dice(Protocol):
    """All the randomness of a walk."""

    def flip(self, probability: float) -> bool:
        """True with this probability."""

    def draw(self, weights: Tensor) -> int:
        """A token, weights [V] not necessarily normalised."""


@dataclass
class Tree:
    """One row of a proposal: `tokens` of its places; `children` as Proposal.children; q [K, V], None: one-hot."""

    tokens: list[int]
    children: dict[int, list[int]]
    q: Tensor | None

    @classmethod
    def of(cls, proposal: Proposal, row: int, tokens: list[int]) -> Tree:
        """`tokens`: the row of proposal.token_ids, on the host."""
        q = None if proposal.q is None else proposal.q[row]
        return cls(tokens, proposal.children(row), q)

    def below(self, place: int) -> list[int]:
        """Its children's places."""
        return self.children.get(place, [])

    def child_with(self, place: int, token: int) -> int | None:
        """The child that holds the token, if any."""
        return next((child for child in self.below(place) if self.tokens[child] == token), None)

    def drawn_from(self, place: int) -> Tensor:
        """q [V] of a child, at its turn if it is the first of its siblings; a copy."""
        if self.q is not None:
            return self.q[place].clone()
        raise ValueError("this rule needs the distributions that drafts were drawn from; the proposal has none")


def sample_match(p: Tensor, tree: Tree, dice: Dice) -> tuple[list[int], int]:
    """The target draws its own token; where it was drafted, the walk goes on from there.

    Whatever was drafted, every token is drawn from p as without drafting, from the same numbers in the same order: a
    seed gives the same text with and without drafts.
    """
    path, place = [], ROOT
    while True:
        token = dice.draw(p[place + 1])
        child = tree.child_with(place, token)
        if child is None:
            return path, token
        path.append(child)
        place = child


def greedy_walk(p: Tensor, tree: Tree, dice: Dice) -> tuple[list[int], int]:
    """As far as the tree holds argmax p [1+K, V]. Preserves p at temperature 0 only, and throws no dice."""
    return follow(argmax(p).tolist(), tree)


def follow(best: list[int], tree: Tree) -> tuple[list[int], int]:
    """The walk along the tokens `best` [1+K] that the target wants after each place."""
    path, place = [], ROOT
    while (child := tree.child_with(place, best[place + 1])) is not None:
        path.append(child)
        place = child
    return path, best[place + 1]


def recursive(p: Tensor, tree: Tree, dice: Dice) -> tuple[list[int], int]:
    """Siblings drawn without replacement are tried in turn, each against what the ones before it left of p and q.

    SpecInfer (Miao et al. 2305.09781), with sampling without replacement (Yang et al. 2402.13720; Jeon et al.
    2402.14160). On a chain it is the token rule.
    """
    path, place = [], ROOT
    while True:
        here, children = p[place + 1], tree.below(place)
        q = tree.drawn_from(children[0]) if children else here
        kept = None
        for child in children:
            token = tree.tokens[child]
            if dice.flip(_ratio(here[token], q[token])):
                kept = child
                break
            here = _left_over(here, q)
            q = _without(q, token)
        if kept is None:
            return path, dice.draw(here)
        path.append(kept)
        place = kept


def traversal(p: Tensor, tree: Tree, dice: Dice) -> tuple[list[int], int]:
    """From the leaves up: a path that fails gives what it had to its siblings, and then to its parent.

    Weng et al. 2505.12398. On a chain it is the block rule; in expectation never less than `recursive`.
    """
    path, rates = [ROOT], [1.0]  # the nodes from the root to where the walk stands, and r of each
    mine: dict[int, Tensor] = {ROOT: p[0]}  # p' of the nodes on the path
    drawn: dict[int, Tensor] = {}  # q' of those with children left
    left = {place: list(children) for place, children in tree.children.items()}
    while True:
        here = path[-1]
        while left.get(here):  # down to the first leaf
            child = left[here][0]
            if here not in drawn:
                drawn[here] = tree.drawn_from(child)
            token = tree.tokens[child]
            rates.append(min(1.0, rates[-1] * _ratio(mine[here][token], drawn[here][token])))
            path.append(child)
            mine[child] = p[child + 1]
            here = child
        if here == ROOT or dice.flip(rates[-1]):
            return path[1:], dice.draw(mine[here])
        path.pop()
        rates.pop()
        above, token = path[-1], tree.tokens[here]
        rest = (rates[-1] * mine[above] - drawn[above]).clamp_(min=0)
        mass = float(rest.sum())
        if mass > 0:  # else p' = q' to the last bit, and nothing could be rejected but by rounding
            mine[above] = rest / mass
        if above != ROOT:
            below = mass + 1 - rates[-1]
            rates[-1] = mass / below if below > 0 else 1.0
        left[above].pop(0)
        drawn[above] = _without(drawn[above], token)


TREE_RULES: dict[str, Callable[[Tensor, Tree, Dice], tuple[list[int], int]]] = {
    "greedy": greedy_walk,
    "sample_match": sample_match,
    "recursive": recursive,
    "traversal": traversal,
}


def _ratio(p: Tensor, q: Tensor) -> float:
    """p / q of one token; 0 where q is 0, which cannot have been drawn."""
    above, below = float(p), float(q)
    return above / below if below > 0 else 0.0


def _left_over(p: Tensor, q: Tensor) -> Tensor:
    """norm((p - q)+) [V]; p where nothing is left."""
    rest = (p - q).clamp_(min=0)
    total = rest.sum()
    return torch.where(total > 0, rest / total, p)


def _without(q: Tensor, token: int) -> Tensor:
    """q [V] once the token is drawn and not put back; changed in place. All zero if it was the last."""
    q[token] = 0
    total = q.sum()
    return q.div_(total) if total > 0 else q
