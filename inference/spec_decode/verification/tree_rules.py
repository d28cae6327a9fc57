"""Verification rules for a tree of drafts: walks from the root whose random numbers are arguments.

A rule is one function in TREE_RULES: (p [1+K, V], the row's tree, dice) -> a walk, which ends with
(places kept, the target's own token). p[0] is the target's distribution after the committed text,
p[1+k] that after place k; like q they come after every processor. A chain is a tree of width one.

A walk is a generator: it yields what it wants to know of distributions, a token drawn (`Tensor`) or
what is left of them after a draft was refused (`Refused`), and is sent the answer. So it touches no
device itself, and the walks of all rows go side by side: `walk_together` answers them all at once,
with as many kernels and waits for one row as for many. With dice that enumerate every outcome a
rule is proved exactly; with those of `rejection_sampler` it runs."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from inference.sampling.sampler import argmax, inverse_cdf
from inference.spec_decode.proposal import Proposal
from speculators.precision import on_device

ROOT = -1


class Dice(Protocol):
    """The randomness of one row's walk, but for the tokens it draws."""

    def flip(self, probability: float) -> bool:
        """True with this probability."""


class Refused(NamedTuple):
    """A draft was refused: what is left of p [V], by which the walk came here with probability
    `rate`, and of q [V]? `following`: the sibling to be tried next, or the same draft again if
    there is none."""

    p: Tensor
    q: Tensor
    rate: float
    token: int
    following: int


class Left(NamedTuple):
    """p: norm((rate p - q)+) [V], and its mass; q: without the token [V]; chances: both of the
    sibling that follows."""

    p: Tensor
    q: Tensor
    mass: float
    chances: tuple[float, float]


Walk = Generator[Tensor | Refused, Any, tuple[list[int], int]]
Draw = Callable[
    [Sequence[int], Tensor], list[int]
]  # rows, their weights [n, V], not necessarily normalised -> tokens


@dataclass
class Tree:
    """One row of a proposal: `tokens` of its places; `children` as Proposal.children; q [K, V],
    None: one-hot. `chances`: of every place p and q of its token, before any of its siblings was
    tried."""

    tokens: list[int]
    children: dict[int, list[int]]
    q: Tensor | None
    chances: Sequence[tuple[float, float]] = ()

    def below(self, place: int) -> list[int]:
        """Its children's places."""
        return self.children.get(place, [])

    def child_with(self, place: int, token: int) -> int | None:
        """The child that holds the token, if any."""
        return next((child for child in self.below(place) if self.tokens[child] == token), None)

    def drawn_from(self, place: int) -> Tensor:
        """q [V] of a child, at its turn if it is the first of its siblings."""
        assert self.q is not None  # see `rejection_sampler.rule_for`
        return self.q[place]


def trees_of(proposal: Proposal, p: Tensor | None = None) -> list[Tree]:
    """The walk of every row. `p` [B, 1+K, V]: the target's distributions, for rules that weigh p
    against q."""
    q, rows = proposal.q, range(proposal.num_rows)
    trees = [
        Tree(proposal.drafted[row], proposal.children(row), None if q is None else q[row])
        for row in rows
    ]
    if p is not None and q is not None and proposal.width:
        for tree, chances in zip(trees, _chances(p, proposal).tolist(), strict=True):
            tree.chances = chances
    return trees


# ---------------------------------------------------------------------- rules


def sample_match(p: Tensor, tree: Tree, dice: Dice) -> Walk:
    """The target draws its own token; where it was drafted, the walk goes on from there.

    Whatever was drafted, every token is drawn from p as without drafting, from the same numbers in
    the same order: a seed gives the same text with and without drafts."""
    path, place = [], ROOT
    while True:
        token = yield p[place + 1]
        child = tree.child_with(place, token)
        if child is None:
            return path, token
        path.append(child)
        place = child


def greedy_walk(p: Tensor, tree: Tree, dice: Dice) -> Walk:
    """As far as the tree holds argmax p [1+K, V]. Preserves p at temperature 0 only, and throws no
    dice."""
    yield from ()
    return follow(argmax(p).tolist(), tree)


def follow(best: Sequence[int], tree: Tree) -> tuple[list[int], int]:
    """The walk along the tokens `best` [1+K] that the target wants after each place."""
    path, place = [], ROOT
    while (child := tree.child_with(place, best[place + 1])) is not None:
        path.append(child)
        place = child
    return path, best[place + 1]


def recursive(p: Tensor, tree: Tree, dice: Dice) -> Walk:
    """Siblings drawn without replacement are tried in turn, each against what the ones before it
    left of p and q.

    SpecInfer (Miao et al. 2305.09781), with sampling without replacement (Yang et al. 2402.13720;
    Jeon et al. 2402.14160). On a chain it is the token rule."""
    path, place = [], ROOT
    while True:
        here, children, kept = p[place + 1], tree.below(place), None
        if children:
            q, chances = tree.drawn_from(children[0]), tree.chances[children[0]]
        for child, following in zip(children, [*children[1:], *children[-1:]], strict=True):
            if dice.flip(_ratio(*chances)):
                kept = child
                break
            here, q, _, chances = yield Refused(
                here, q, 1.0, tree.tokens[child], tree.tokens[following]
            )
        if kept is None:
            return path, (yield here)
        path.append(kept)
        place = kept


def traversal(p: Tensor, tree: Tree, dice: Dice) -> Walk:
    """From the leaves up: a path that fails gives what it had to its siblings, and then to its
    parent.

    Weng et al. 2505.12398. On a chain it is the block rule; in expectation never less than
    `recursive`. Batches are walked by `traverse_together`."""
    path, rates = [ROOT], [1.0]  # the nodes from the root to where the walk stands, and r of each
    mine: dict[int, Tensor] = {ROOT: p[0]}  # p' of the nodes on the path
    drawn: dict[int, Tensor] = {}  # q' of those that a child was refused of
    chances = dict(enumerate(tree.chances))
    left = {place: list(children) for place, children in tree.children.items()}
    while True:
        here = path[-1]
        while left.get(here):  # down to the first leaf
            child = left[here][0]
            rates.append(min(1.0, rates[-1] * _ratio(*chances[child])))
            path.append(child)
            mine[child] = p[child + 1]
            here = child
        if here == ROOT or dice.flip(rates[-1]):
            return path[1:], (yield mine[here])
        path.pop()
        rates.pop()
        above = path[-1]
        left[above].pop(0)
        following = left[above][0] if left[above] else here
        q = drawn[above] if above in drawn else tree.drawn_from(here)
        mine[above], drawn[above], mass, chances[following] = yield Refused(
            mine[above], q, rates[-1], tree.tokens[here], tree.tokens[following]
        )
        if above != ROOT:
            below = mass + 1 - rates[-1]
            rates[-1] = mass / below if below > 0 else 1.0


TREE_RULES: dict[str, Callable[[Tensor, Tree, Dice], Walk]] = {
    "greedy": greedy_walk,
    "sample_match": sample_match,
    "recursive": recursive,
    "traversal": traversal,
}


# ---------------------------------------------------------------------- walks of many rows


def walk_together(walks: Sequence[Walk], draw: Draw) -> list[tuple[list[int], int]]:
    """Runs the walks of all rows side by side. What several of them want to know at a time is
    answered at once; tokens are drawn when no row waits for anything else."""
    ends: dict[int, tuple[list[int], int]] = {}
    asked: dict[int, Tensor | Refused] = {}

    def go_on(rows: Sequence[int], answers: Sequence[Any]) -> None:
        for row, answer in zip(rows, answers, strict=True):
            try:
                asked[row] = walks[row].send(answer)
            except StopIteration as end:
                ends[row] = end.value
                asked.pop(row, None)

    go_on(range(len(walks)), [None] * len(walks))
    while asked:
        refused = {row: each for row, each in asked.items() if isinstance(each, Refused)}
        if refused:
            go_on([*refused], _left(list(refused.values())))
        else:
            rows = [*asked]
            go_on(
                rows,
                draw(
                    rows,
                    torch.stack(
                        [weights for weights in asked.values() if isinstance(weights, Tensor)]
                    ),
                ),
            )
    return [ends[row] for row in range(len(walks))]


def match_together(p: Tensor, proposal: Proposal, numbers: Tensor) -> list[tuple[list[int], int]]:
    """`sample_match` for p [B, 1+K, V] where the d-th token of row b is drawn with numbers[b, d]
    (float64, for every row as many as its drafts are deep, and one): the device is not waited for
    before all walks are done."""
    width, rows = proposal.width, torch.arange(len(p), device=p.device)
    above, places = _parents(proposal, p.device), torch.arange(1, 1 + width, device=p.device)
    at = torch.zeros_like(
        rows
    )  # [B] where the walk stands: 0 the root, 1 + k place k, 1 + width where it has ended
    tokens, stations = [], []  # [B] of every depth
    for d in range(numbers.shape[1]):
        tokens.append(inverse_cdf(p[rows, at.clamp(max=width)], numbers[:, d]))
        if d + 1 < numbers.shape[1]:
            found = (above == at.unsqueeze(1)) & (
                proposal.token_ids == tokens[-1].unsqueeze(1)
            )  # [B, K]
            at = torch.where(found, places, 1 + width).amin(
                1
            )  # the first of the children that hold the token
            stations.append(at)
            if p.device.type == "cpu" and bool(
                (at > width).all()
            ):  # elsewhere asking costs more than going on
                break
    walks = []
    for values in torch.stack([*tokens, *stations], 1).tolist():
        path = [station - 1 for station in values[len(tokens) :] if station <= width]
        walks.append((path, values[len(path)]))
    return walks


def traverse_together(
    p: Tensor, proposal: Proposal, numbers: np.ndarray
) -> tuple[list[tuple[list[int], int]], list[int]]:
    """`traversal` for p [B, 1+K, V], which is overwritten, and numbers [B, 1+K] float64 -> the
    walks, and how many of its numbers each row took: one per draft tried, one for the token.

    In which order a row tries its drafts is known beforehand: each after all drafts behind it. Step
    t tries the t-th draft of every row, and waits for the device once."""
    assert proposal.q is not None  # see `rule_for`
    order, ways, following = _post_order(_stations(proposal))
    every, depths = np.arange(len(p)), (ways > 0).sum(-1)  # [B], [B, 1+K]
    ratios, rates = (
        _ratios(p, proposal),
        np.ones((len(p), ways.shape[2])),
    )  # [B, 1+K], of nodes; [B, 1+D], on the way
    drafted = np.array(proposal.drafted, dtype=np.int64).reshape(len(p), -1)
    top = np.zeros_like(every)  # [B] the way is new from here on down
    begun = np.zeros(
        rates.shape, dtype=bool
    )  # whether a child was refused of the node at that depth of the way,
    drawn = proposal.q.new_empty(len(p), rates.shape[1], p.shape[2])  # and then its q [B, 1+D, V]
    ends, used = np.zeros_like(every), 1 + np.array(proposal.counts, dtype=np.int64)
    rows = np.flatnonzero(used > 1)
    for t in range(proposal.width):
        here = order[rows, t]
        for d in range(1, rates.shape[1]):
            new = (d > top[rows]) & (d <= depths[rows, here])
            r, node = rows[new], ways[rows[new], here[new], d]
            rates[r, d], begun[r, d] = np.minimum(1.0, rates[r, d - 1] * ratios[r, node]), False
        accepted = numbers[rows, t] < rates[rows, depths[rows, here]]
        ends[rows[accepted]], used[rows[accepted]] = here[accepted], t + 2
        rows, here = rows[~accepted], here[~accepted]
        if not rows.size:
            break
        top[rows] = depth = depths[rows, here] - 1
        then = np.where(
            following[rows, here] > 0, following[rows, here], here
        )  # after the last sibling it is not read
        tokens = drafted[rows, here - 1], drafted[rows, then - 1]
        places = (rows, ways[rows, here, depth], here - 1, depth, begun[rows, depth], *tokens)
        mass, above, below = _refuse(p, proposal.q, drawn, np.stack(places, 1), rates[rows, depth])
        begun[rows, depth] = True
        ratios[rows, then] = np.divide(above, below, out=np.zeros_like(above), where=below > 0)
        share = mass + 1 - rates[rows, depth]
        left = np.divide(mass, share, out=np.ones_like(mass), where=share > 0)
        rates[rows, depth] = np.where(depth > 0, left, 1.0)
        rows = rows[used[rows] > t + 2]  # the others are at the root
    weights = p[torch.arange(len(p), device=p.device), on_device(ends, p.device)]
    last = on_device(numbers[every, used - 1], p.device, torch.float64)
    path, tokens = ways[every, ends].tolist(), inverse_cdf(weights, last).tolist()
    walks = [
        ([station - 1 for station in row if station], token)
        for row, token in zip(path, tokens, strict=True)
    ]
    return walks, used.tolist()


def _refuse(
    p: Tensor, q: Tensor, drawn: Tensor, places: np.ndarray, rates: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What n refused drafts leave, written to p [B, 1+K, V] at their parents and to drawn [B, 1+D,
    V] at these's depths -> the mass left, and p and q of the tokens to be tried next, [n] float64
    each.

    places [n, 7]: row, parent, place, depth of the parent, whether q is in `drawn` already, token,
    next token."""
    rows, above, place, depth, begun, token, following = on_device(places, p.device).unbind(1)
    own = torch.where(begun.bool().unsqueeze(1), drawn[rows, depth], q[rows, place])
    rest, mass = _left_over(p[rows, above], own, on_device(rates, p.device, p.dtype).unsqueeze(1))
    own = _without(own, token.unsqueeze(1))
    p[rows, above], drawn[rows, depth] = rest, own
    nexts = following.unsqueeze(1)
    found = torch.cat([mass, rest.gather(1, nexts), own.gather(1, nexts)], dim=1).tolist()
    mass_left, mine, drafted = np.array(found).T
    return mass_left, mine, drafted


def _post_order(above: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """above [B, K] of `_stations` -> order [B, K], the stations with children before parents and
    siblings by place, 0 behind the last; ways [B, 1+K, 1+D], the stations on the way to each by
    depth, 0 beyond it; following [B, 1+K], the next sibling of each, 0 if there is none."""
    B, K = above.shape
    depths, sizes = np.zeros((B, 1 + K), dtype=np.int64), np.zeros((B, 1 + K), dtype=np.int64)
    steps = [(k + 1, rows := np.flatnonzero(above[:, k] >= 0), above[rows, k]) for k in range(K)]
    for station, rows, parent in steps:
        depths[rows, station] = depths[rows, parent] + 1
    for station, rows, parent in reversed(steps):  # of the subtrees
        sizes[rows, station] += 1
        sizes[rows, parent] += sizes[rows, station]
    order, following = np.zeros((B, K), dtype=np.int64), np.zeros((B, 1 + K), dtype=np.int64)
    ways = np.zeros((B, 1 + K, 1 + depths.max()), dtype=np.int64)
    free, latest = (
        np.zeros((B, 1 + K), dtype=np.int64),
        np.zeros((B, 1 + K), dtype=np.int64),
    )  # where its next child's
    for station, rows, parent in steps:  # subtree begins in the order, and its last child so far
        free[rows, station] = free[rows, parent]
        free[rows, parent] += sizes[rows, station]
        order[rows, free[rows, parent] - 1] = station
        elder, latest[rows, parent] = latest[rows, parent], station
        following[rows[elder > 0], elder[elder > 0]] = station
        ways[rows, station] = ways[rows, parent]
        ways[rows, station, depths[rows, station]] = station
    return order, ways, following


def _ratios(p: Tensor, proposal: Proposal) -> np.ndarray:
    """p / q of the token of every place before any of its siblings was tried, [B, 1+K]; 0 where q
    is 0."""
    found = np.zeros(p.shape[:2])
    chances = _chances(p, proposal)
    np.divide(chances[..., 0], chances[..., 1], out=found[:, 1:], where=chances[..., 1] > 0)
    return found


def _chances(p: Tensor, proposal: Proposal) -> np.ndarray:
    """p and q of the token of every place before any of its siblings was tried, [B, K, 2]
    float64."""
    assert proposal.q is not None
    above = _parents(proposal, p.device).clamp(min=0)  # [B, K]
    mine = p[torch.arange(len(p), device=p.device).unsqueeze(1), above, proposal.token_ids]
    drawn = proposal.q.gather(-1, proposal.token_ids.unsqueeze(-1)).squeeze(-1)
    found = torch.stack([mine, drawn.to(p.dtype)], dim=-1).tolist()
    return np.array(found, dtype=np.float64).reshape(len(p), proposal.width, 2)


def _parents(proposal: Proposal, device: torch.device) -> Tensor:
    return on_device(_stations(proposal), device)


def _stations(proposal: Proposal) -> np.ndarray:
    """[B, K]: 0 for drafts behind the root, 1 + k for those behind place k; -1 for what is not
    judged."""
    found = []
    for row, count in enumerate(proposal.counts):
        parents = (
            range(-1, count - 1) if proposal.parents is None else proposal.parents[row][:count]
        )
        found.append([*(1 + parent for parent in parents), *[-1] * (proposal.width - count)])
    return np.array(found, dtype=np.int64).reshape(len(found), proposal.width)


def _ratio(p: float, q: float) -> float:
    """p / q of one token; 0 where q is 0, which cannot have been drawn."""
    return p / q if q > 0 else 0.0


def _left(refused: Sequence[Refused]) -> list[Left]:
    """The answers to questions of as many rows."""
    p, q = (
        torch.stack([each.p for each in refused]),
        torch.stack([each.q for each in refused]),
    )  # [n, V]
    rates = on_device([each.rate for each in refused], p.device, p.dtype).unsqueeze(-1)
    ids = on_device([[each.token, each.following] for each in refused], p.device)  # [n, 2]
    p, mass = _left_over(p, q, rates)
    q = _without(q, ids[:, :1])
    values = torch.cat([mass, p.gather(1, ids[:, 1:]), q.gather(1, ids[:, 1:])], dim=1).tolist()
    return [
        Left(p[i], q[i], total, (above, below)) for i, (total, above, below) in enumerate(values)
    ]


def _left_over(p: Tensor, q: Tensor, rates: Tensor) -> tuple[Tensor, Tensor]:
    """norm((rate p - q)+) [n, V], p where nothing is left, and what was left [n, 1]. Nothing is
    left where p and q are the same to the last bit, and nothing could be refused but by
    rounding."""
    rest = (rates * p - q).clamp_(min=0)
    mass = rest.sum(-1, keepdim=True)
    return torch.where(mass > 0, rest / mass, p), mass


def _without(q: Tensor, tokens: Tensor) -> Tensor:
    """q [n, V] once tokens [n, 1] are drawn and not put back. All zero if it was the last."""
    q = q.scatter(1, tokens, 0.0)
    total = q.sum(-1, keepdim=True)
    return torch.where(total > 0, q / total, q)
