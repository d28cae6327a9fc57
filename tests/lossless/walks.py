"""Rules for trees as the papers state them, one row at a time: oracles for the batched ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from draftsmith.inference.spec_decode.proposal import Proposal

Flip = Callable[[float], bool]
Draw = Callable[[Tensor], int]
ROOT = -1


class Tree(NamedTuple):
    """One row of a proposal: tokens and q [K, V] by node, children by parent."""

    tokens: list[int]
    children: dict[int, list[int]]
    q: Tensor | None

    @classmethod
    def of(cls, proposal: Proposal, row: int) -> Tree:
        q = None if proposal.q is None else proposal.q[row]
        return cls(proposal.drafted[row], proposal.children(row), q)


def residual(p: Tensor, q: Tensor, rate: float = 1.0) -> tuple[Tensor, float]:
    """norm((rate p - q)+) [V], p where nothing is left, and what was left."""
    left = (rate * p - q).clamp(min=0)
    mass = float(left.sum())
    return (left / mass if mass > 0 else p), mass


def without(q: Tensor, token: int) -> Tensor:
    """q [V] once the token is drawn and not put back."""
    q = q.clone()
    q[token] = 0
    return q / q.sum() if q.sum() > 0 else q


def ratio(p: Tensor, q: Tensor, token: int) -> float:
    return float(p[token]) / float(q[token]) if q[token] > 0 else 0.0


def sample_match(p: Tensor, tree: Tree, draw: Draw) -> tuple[list[int], int]:
    """The target draws its own token; where it was drafted, the walk goes on from there."""
    path, node = [], ROOT
    while True:
        token = draw(p[node + 1])
        matching = [child for child in tree.children.get(node, []) if tree.tokens[child] == token]
        if not matching:
            return path, token
        node = matching[0]
        path.append(node)


def greedy(p: Tensor, tree: Tree) -> tuple[list[int], int]:
    return sample_match(p, tree, lambda weights: int(weights.argmax()))


def recursive(p: Tensor, tree: Tree, flip: Flip) -> tuple[list[int], Tensor]:
    """Siblings in turn, each against what the ones before it left of p and q. -> the path, and the
    distribution [V] of the token after it.

    SpecInfer (Miao et al. 2305.09781), with sampling without replacement (Yang et al. 2402.13720).
    On a chain it is the token rule."""
    path, node = [], ROOT
    while True:
        p_left, children = p[node + 1], tree.children.get(node, [])
        q = tree.q[children[0]] if children else None
        for child in children:
            token = tree.tokens[child]
            if flip(min(1.0, ratio(p_left, q, token))):
                break
            p_left, q = residual(p_left, q)[0], without(q, token)
        else:
            return path, p_left
        path.append(child)
        node = child


def traversal(p: Tensor, tree: Tree, flip: Flip) -> tuple[list[int], Tensor]:
    """From the leaves up: a path that fails gives what it had to its siblings, and then to its
    parent (Weng et al. 2505.12398). -> the path, and the distribution [V] of the token after it."""
    path, rates, left_p, left_q = [ROOT], [1.0], {ROOT: p[0]}, {}
    untried = {node: list(below) for node, below in tree.children.items()}
    while True:
        while untried.get(path[-1]):
            above, child = path[-1], untried[path[-1]][0]
            q = left_q.setdefault(above, tree.q[child])
            rates.append(min(1.0, rates[-1] * ratio(left_p[above], q, tree.tokens[child])))
            path.append(child)
            left_p[child] = p[child + 1]
        if path[-1] == ROOT or flip(rates[-1]):
            return path[1:], left_p[path[-1]]
        child, _ = path.pop(), rates.pop()
        above = path[-1]
        untried[above].pop(0)
        left_p[above], mass = residual(left_p[above], left_q[above], rates[-1])
        left_q[above] = without(left_q[above], tree.tokens[child])
        if above != ROOT:
            below = mass + 1 - rates[-1]
            rates[-1] = mass / below if below > 0 else 1.0


def choose(weights: Tensor, number: float) -> int:
    """The first token whose cumulative weight exceeds the number's share of the total."""
    cumulative = weights.double().cumsum(0)
    return int(torch.searchsorted(cumulative, number * cumulative[-1], right=True))
