"""How trees of drafts grow, level by level.

A tree hangs below the last committed token of a row; parents come before their children. Knows
neither a target nor a drafter: logits come in, tokens and their parents go out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from draftsmith.inference.requests.request import Request
from draftsmith.inference.sampling.sampler import batch_probabilities, inverse_cdf, uniforms
from draftsmith.inference.sampling_params import SamplingParams
from draftsmith.inference.spec_decode.logits import active_rows, process_draft_logits
from draftsmith.inference.spec_decode.proposal import Proposal
from draftsmith.inference.spec_decode.tree_shape import DynamicTree, StaticTree, TreeShape
from draftsmith.inference.spec_decode.verification.tree_rules import ROOT
from draftsmith.speculators.drafter import TreeLevel
from draftsmith.speculators.precision import on_device, to_device
from draftsmith.speculators.vocab.draft_vocab import scatter_to_target, to_target_ids


@dataclass
class _Level:
    """m children of each of the w nodes that were drafted from: node i is child i % m of the
    (i // m)-th of these.

    q         [b, w, V_draft] what the children were drafted from
    parents   [b, w] the place of each of the w nodes in the level above
    tokens    [b, w·m] in the drafter's vocabulary
    score     [b, w·m] product of the drafter's probabilities on the way
    alive     bool [b, w·m]: it was drafted, and so was its parent
    """

    q: Tensor
    parents: Tensor
    tokens: Tensor
    score: Tensor
    alive: Tensor

    @property
    def children(self) -> int:
        """m."""
        return self.tokens.shape[1] // self.parents.shape[1]


class TreeGrowth:
    """One round's trees, a `Drafter.draft_tree` callback: draft logits in, the next level out; then
    `proposal`. The shape is the subclass's.

    Rows at temperature 0, and all if not `probabilistic`, take the likeliest children. The others
    draw theirs without replacement, and every child that is drawn is verified: how many a node gets
    is decided before the first is drawn, from q and the way to the node, so that no draft's own
    value decides whether it is judged."""

    def __init__(
        self,
        depth: int,
        requests: Sequence[Request],
        limits: Sequence[int],
        draft_to_target: Tensor | None,
        vocab_size: int,
        *,
        probabilistic: bool = True,
    ) -> None:
        """`depth`: most levels. `limits`: those of each row. `vocab_size`: the target's."""
        self._requests, self._limits = requests, [min(limit, depth) for limit in limits]
        self._ids, self._vocab_size = draft_to_target, vocab_size
        self._hot = [probabilistic and not request.params.greedy for request in requests]
        cold = SamplingParams()
        self._params = [cold if request.params.greedy else request.params for request in requests]
        self._levels: list[_Level] = []
        self._frontier: Tensor | None = None  # [b, w] places of the last level to draft from
        self._visible: Tensor | None = None  # bool [b, w, drafts drafted from so far]
        # to the frontier, if any request changes its logits
        self._paths: list[list[list[int]]] | None = (
            [[[]] for _ in requests] if active_rows(requests) else None
        )

    def _selected(self, q: Tensor, score: Tensor) -> Tensor:
        """bool [b, w, m]: which children of the frontier to draft, decided by q [b, w, V_draft] and
        the scores [b, w] of the frontier alone."""
        raise NotImplementedError

    def _expanded(self, level: _Level) -> Tensor:
        """[b, w] ascending: the places of the level to draft from next."""
        raise NotImplementedError

    def _kept(self, nodes: list[_Node], row: int) -> list[_Node]:
        """Those of the nodes of a row, drafted within its limit, that are verified."""
        raise NotImplementedError

    def __call__(self, logits: Tensor) -> TreeLevel | None:
        """Draft logits [b, w, V_draft] after each of the frontier -> what to draft from next; None
        at the end."""
        if self._paths is not None:
            logits = process_draft_logits(
                logits, self._requests, self._paths, self._ids, self._vocab_size
            )
        level = self._drafted(batch_probabilities(logits, self._params))
        self._levels.append(level)
        if len(self._levels) == max(self._limits):
            return None
        self._frontier = frontier = self._expanded(level)
        parents = frontier // level.children
        tokens = to_target_ids(level.tokens.gather(1, frontier), self._ids)
        self._visible = self._seen_by(parents)
        if self._paths is not None:
            grown = torch.stack([parents, tokens], 1).tolist()
            self._paths = [
                [[*before[parent], token] for parent, token in zip(*row, strict=True)]
                for before, row in zip(self._paths, grown, strict=True)
            ]
        return TreeLevel(tokens, parents, self._visible)

    def _drafted(self, q: Tensor) -> _Level:
        """The level that is drafted from q [b, w, V_draft]."""
        b, w, _ = q.shape
        if self._frontier is None:
            parents = torch.zeros(b, w, dtype=torch.long, device=q.device)
            score, alive = q.new_ones(b, w), torch.ones(b, w, dtype=torch.bool, device=q.device)
        else:
            parents = self._frontier
            alive = self._levels[-1].alive.gather(1, parents)
            # no child of a node that was not drafted would be verified
            score = self._levels[-1].score.gather(1, parents).masked_fill(~alive, 0.0)
        selected = self._selected(q, score)
        likeliest = q.topk(min(selected.shape[2], q.shape[-1]), dim=-1)
        tokens, real = likeliest.indices, likeliest.values > 0  # [b, w, m]
        if any(self._hot):
            hot = on_device(self._hot, q.device, torch.bool)[:, None, None]
            drawn, exists = self._drawn(q, *selected.shape[1:])
            tokens, real = torch.where(hot, drawn, tokens), torch.where(hot, exists, real)
        score = score[..., None] * q.gather(2, tokens).clamp(max=1)
        alive = alive[..., None] & selected & real
        return _Level(q, parents, tokens.flatten(1), score.flatten(1), alive.flatten(1))

    def _drawn(self, q: Tensor, w: int, m: int) -> tuple[Tensor, Tensor]:
        """Children [b, w, m] in turn, without replacement, and whether there was one to draw. A row
        takes one number per place of the level, whatever the others do, and none below its own
        limit."""
        depth = len(self._levels)
        numbers = [
            uniforms(request.generator, w * m) if hot and depth < limit else [0.0] * (w * m)
            for request, hot, limit in zip(self._requests, self._hot, self._limits, strict=True)
        ]
        noise = on_device(numbers, q.device, torch.float64).view(-1, m)  # [b·w, m]
        left, tokens, exists = q.flatten(0, 1).clone(), [], []
        for j in range(m):
            token = inverse_cdf(left, noise[:, j])
            exists.append(token < q.shape[-1])
            tokens.append(token.clamp(max=q.shape[-1] - 1))
            left.scatter_(1, tokens[-1].unsqueeze(1), 0.0)
        return torch.stack(tokens, 1).view(-1, w, m), torch.stack(exists, 1).view(-1, w, m)

    def _seen_by(self, parents: Tensor) -> Tensor:
        """[b, w] places in the frontier before -> bool [b, w, n + w], what each of the new frontier
        sees."""
        b, w = parents.shape
        own = torch.eye(w, dtype=torch.bool, device=parents.device).expand(b, -1, -1)
        if self._visible is None:
            return own
        index = parents.unsqueeze(-1).expand(-1, -1, self._visible.shape[-1])
        return torch.cat([self._visible.gather(1, index), own], dim=2)

    def proposal(self) -> Proposal:
        """The trees as grown: parents first, siblings as they were drafted."""
        device = self._levels[0].q.device
        rows = [
            sorted(self._kept([node for node in nodes if node.depth < limit], row))
            for row, (nodes, limit) in enumerate(zip(self._nodes(), self._limits, strict=True))
        ]
        width = max(map(len, rows))
        parents = []
        for nodes in rows:
            place_of = {(node.depth, node.place): place for place, node in enumerate(nodes)}
            parents.append(
                [place_of[node.depth - 1, node.parent] if node.depth else ROOT for node in nodes]
            )
        padded = [[(n.token, n.source) for n in nodes] for nodes in rows]
        padded = [nodes + [(0, 0)] * (width - len(nodes)) for nodes in padded]
        tokens, source = on_device(padded, device).view(len(rows), width, 2).unbind(-1)
        q = None
        if any(self._hot):
            every = torch.cat([level.q for level in self._levels], dim=1)  # [b, all w, V_draft]
            q = every.gather(1, source.unsqueeze(-1).expand(-1, -1, every.shape[-1]))
            q = scatter_to_target(q, self._ids, self._vocab_size)
        return Proposal(to_target_ids(tokens, self._ids), list(map(len, rows)), q, parents)

    def _nodes(self) -> list[list[_Node]]:
        """What was drafted for each row; one copy from the device."""
        parts = [
            part.double()  # which holds every value exactly
            for level in self._levels
            for part in (level.parents, level.tokens, level.score, level.alive)
        ]
        grown = torch.cat(parts, dim=1).tolist()
        rows: list[list[_Node]] = [[] for _ in grown]
        start = offset = 0
        for depth, level in enumerate(self._levels):
            w, m = level.parents.shape[1], level.children
            for nodes, numbers in zip(rows, grown, strict=True):
                parents = numbers[start : start + w]
                tokens, scores, alive = (
                    numbers[start + w + k * w * m : start + w + (k + 1) * w * m] for k in range(3)
                )
                nodes += [
                    _Node(
                        depth, i, int(parents[i // m]), int(tokens[i]), offset + i // m, scores[i]
                    )
                    for i in range(w * m)
                    if alive[i]
                ]
            start += w + 3 * w * m
            offset += w
        return rows


class _Node(NamedTuple):
    """place: in its level; parent: its parent's in the level above; source: which of all
    levels' distributions it was drafted from."""

    depth: int
    place: int
    parent: int
    token: int
    source: int
    score: float


class StaticGrowth(TreeGrowth):
    """The same tree every round."""

    def __init__(self, tree: StaticTree, *others: Any, **options: Any) -> None:
        super().__init__(tree.depth, *others, **options)
        self._tree = tree

    def _selected(self, q: Tensor, score: Tensor) -> Tensor:
        nodes = self._tree.levels[len(self._levels)]
        selected = torch.zeros(q.shape[1], 1 + max(rank for _, rank in nodes), dtype=torch.bool)
        for parent, rank in nodes:
            selected[parent, rank] = True
        return to_device(selected, q.device).expand(len(q), -1, -1)

    def _expanded(self, level: _Level) -> Tensor:
        depth = len(self._levels) - 1
        places = [parent * level.children + rank for parent, rank in self._tree.levels[depth]]
        frontier = [places[i] for i in self._tree.frontiers[depth]]
        return on_device(frontier, level.tokens.device).expand(len(level.tokens), -1)

    def _kept(self, nodes: list[_Node], row: int) -> list[_Node]:
        return nodes


class DynamicGrowth(TreeGrowth):
    """Grown every round: `topk` children of each of the `topk` likeliest nodes of a level, of which
    the likeliest are verified; of a sampled row a number that is dealt out to levels beforehand."""

    def __init__(self, tree: DynamicTree, *others: Any, **options: Any) -> None:
        super().__init__(tree.depth, *others, **options)
        self._tree = tree

    def _selected(self, q: Tensor, score: Tensor) -> Tensor:
        b, w, V = q.shape
        m = min(self._tree.topk, V)
        selected = torch.ones(b, w, m, dtype=torch.bool, device=q.device)
        if not any(self._hot):
            return selected
        # the j-th child matters if the path to it holds and the j children before it were refused
        sure = q.amax(-1)  # [b, w]
        refused = (1 - sure).unsqueeze(-1) ** torch.arange(m, device=q.device)
        chances = (score * sure).unsqueeze(-1) * refused
        chances[:, :, 0] = score
        draws = min(self._tree.draws(len(self._levels)), w * m)
        best = chances.flatten(1).topk(draws, dim=1).indices
        drawn = torch.zeros(b, w * m, dtype=torch.bool, device=q.device)
        drawn.scatter_(1, best, torch.ones_like(best, dtype=torch.bool))
        hot = on_device(self._hot, q.device, torch.bool)[:, None, None]
        return torch.where(hot, drawn.unflatten(1, (w, m)), selected)

    def _expanded(self, level: _Level) -> Tensor:
        wide = min(self._tree.topk, level.tokens.shape[1])
        likeliest = level.score.masked_fill(~level.alive, -1.0).topk(wide, dim=1)
        return likeliest.indices.sort(1).values

    def _kept(self, nodes: list[_Node], row: int) -> list[_Node]:
        if self._hot[row]:
            return nodes
        # a child's score is never above its parent's, which comes first: no parent is left out
        likeliest = sorted(nodes, key=lambda node: (-node.score, node.depth, node.place))
        return likeliest[: self._tree.budget]


def grow(tree: TreeShape, *others: Any, **options: Any) -> TreeGrowth:
    """Trees of this shape; the other arguments are those of TreeGrowth."""
    if isinstance(tree, StaticTree):
        return StaticGrowth(tree, *others, **options)
    return DynamicGrowth(tree, *others, **options)
