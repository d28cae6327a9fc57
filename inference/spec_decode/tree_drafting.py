"""How trees of drafts grow, level by level.

A tree hangs below the last committed token of a row; parents come before their children. Knows
neither a target nor a drafter: logits come in, tokens and their parents go out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from draftsmith.inference.requests.request import Request
from draftsmith.inference.sampling.sampler import batch_probabilities, inverse_cdf, uniforms
from draftsmith.inference.sampling_params import SamplingParams
from draftsmith.inference.spec_decode.logits import active_rows, process_draft_logits
from draftsmith.inference.spec_decode.proposal import Proposal, padded
from draftsmith.inference.spec_decode.tree_shape import DynamicTree, StaticTree
from draftsmith.inference.spec_decode.verification.tree_rules import ROOT
from draftsmith.speculators.drafter import TreeLevel
from draftsmith.speculators.precision import on_device, to_device
from draftsmith.speculators.vocab.draft_vocab import scatter_to_target, to_target_ids

Shape = TypeVar("Shape", StaticTree, DynamicTree)


@dataclass
class _Level:
    """m children of each of the w nodes that were drafted from: node i is child i % m of the
    (i // m)-th of these.

    q         [b, w, V_draft] what the children were drafted from
    parents   [b, w] the place of each of the w nodes in the level above
    tokens    [b, w·m] in the drafter's vocabulary
    score     [b, w·m] product of the drafter's probabilities on the way; -1 if it was not drafted,
              or its parent was not
    """

    q: Tensor
    parents: Tensor
    tokens: Tensor
    score: Tensor

    @property
    def children(self) -> int:
        """m."""
        return self.tokens.shape[1] // self.parents.shape[1]


class TreeGrowth(ABC, Generic[Shape]):
    """One round's trees, a `Drafter.draft_tree` callback: draft logits in, the next level out; then
    `proposal`. What a level drafts, which of its nodes are drafted from and which are verified is
    said by the two classes below.

    Rows at temperature 0, and all if not `probabilistic`, take the likeliest children. The others
    draw theirs without replacement, and every child that is drawn is verified: how many a node gets
    is decided before the first is drawn, from q and the way to the node, so that no draft's own
    value decides whether it is judged."""

    def __init__(
        self,
        tree: Shape,
        requests: Sequence[Request],
        limits: Sequence[int],
        draft_to_target: Tensor | None,
        vocab_size: int,
        *,
        probabilistic: bool = True,
    ) -> None:
        """`limits`: nodes of each row at most, 0 for a row without a tree. `vocab_size`: the
        target's."""
        self._tree: Shape = tree
        self._requests = requests
        # of each row; None: it has no tree
        self._shapes: list[Shape | None] = [tree.cut(limit) if limit else None for limit in limits]
        self._budgets = [0 if shape is None else shape.budget for shape in self._shapes]
        self._limits = [0 if shape is None else shape.depth for shape in self._shapes]  # levels
        self._draft_to_target = draft_to_target
        self._vocab_size = vocab_size
        self._hot = [probabilistic and not request.params.greedy for request in requests]
        cold = SamplingParams()
        self._params = [cold if request.params.greedy else request.params for request in requests]
        self._levels: list[_Level] = []
        self._frontier: Tensor | None = None  # [b, w] places of the last level to draft from
        self._visible: Tensor | None = None  # bool [b, w, drafts drafted from so far]
        # the tokens that lead to the frontier, if any request changes its logits by them
        self._paths: list[list[list[int]]] | None = None
        if active_rows(requests):
            self._paths = [[[]] for _ in requests]

    @abstractmethod
    def _selected(self, q: Tensor, score: Tensor) -> Tensor:
        """bool [b, w, m]: which children of the frontier to draft, decided by q [b, w, V_draft] and
        the scores [b, w] of the frontier alone."""

    @abstractmethod
    def _expanded(self, level: _Level) -> Tensor:
        """[b, w] ascending: the places of the newest level to draft from next."""

    @abstractmethod
    def _pruned(self, row: int, nodes: list[int], scores: Sequence[float]) -> list[int]:
        """Those of the drafted `nodes` of a row that are verified, ascending. scores: of all
        nodes."""

    def __call__(self, logits: Tensor) -> TreeLevel | None:
        """Draft logits [b, w, V_draft] after each of the frontier -> what to draft from next; None
        at the end."""
        if self._paths is not None:
            logits = process_draft_logits(
                logits, self._requests, self._paths, self._draft_to_target, self._vocab_size
            )
        level = self._drafted(batch_probabilities(logits, self._params))
        self._levels.append(level)
        if len(self._levels) == max(self._limits):
            return None
        frontier = self._expanded(level)
        parents = frontier // level.children
        tokens = to_target_ids(level.tokens.gather(1, frontier), self._draft_to_target)
        self._frontier = frontier
        self._visible = self._seen_by(parents)
        if self._paths is not None:
            self._paths = _extended(self._paths, parents, tokens)
        return TreeLevel(tokens, parents, self._visible)

    def _drafted(self, q: Tensor) -> _Level:
        """The level that is drafted from q [b, w, V_draft]."""
        b, w, _ = q.shape
        if self._frontier is None:
            parents = torch.zeros(b, w, dtype=torch.long, device=q.device)
            above = q.new_ones(b, w)
        else:
            parents = self._frontier
            above = self._levels[-1].score.gather(1, parents)
        score = above.clamp(min=0)  # no child of a node that was not drafted would be verified
        selected = self._selected(q, score)
        likeliest = q.topk(min(selected.shape[2], q.shape[-1]), dim=-1)
        tokens = likeliest.indices  # [b, w, m]
        exists = likeliest.values > 0
        if any(self._hot):
            hot = on_device(self._hot, q.device, torch.bool)[:, None, None]
            drawn, was_drawn = self._drawn(q, *selected.shape[1:])
            tokens = torch.where(hot, drawn, tokens)
            exists = torch.where(hot, was_drawn, exists)
        score = score[..., None] * q.gather(2, tokens).clamp(max=1)
        score = torch.where((above >= 0)[..., None] & selected & exists, score, -1.0)
        return _Level(q, parents, tokens.flatten(1), score.flatten(1))

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
        left = q.flatten(0, 1).clone()
        tokens: list[Tensor] = []
        exists: list[Tensor] = []
        for j in range(m):
            token = inverse_cdf(left, noise[:, j])
            exists.append(token < q.shape[-1])
            tokens.append(token.clamp(max=q.shape[-1] - 1))
            left.scatter_(1, tokens[-1].unsqueeze(1), 0.0)
        return torch.stack(tokens, 1).view(-1, w, m), torch.stack(exists, 1).view(-1, w, m)

    def _seen_by(self, parents: Tensor) -> Tensor:
        """[b, w] places in the frontier before -> bool [b, w, n + w], what each node of the new
        frontier sees."""
        b, w = parents.shape
        themselves = torch.eye(w, dtype=torch.bool, device=parents.device).expand(b, -1, -1)
        if self._visible is None:
            return themselves
        index = parents.unsqueeze(-1).expand(-1, -1, self._visible.shape[-1])
        return torch.cat([self._visible.gather(1, index), themselves], dim=2)

    # ------------------------------------------------------------------ what has grown

    def proposal(self) -> Proposal:
        """The trees as grown: parents first, siblings as they were drafted."""
        depths, sources = self._depths_and_sources()
        tokens: list[list[int]] = []
        parents: list[list[int]] = []
        sources_of_rows: list[list[int]] = []
        for row, nodes in enumerate(self._nodes().tolist()):  # one copy from the device
            scores = [score for _, _, score in nodes]
            limit = self._limits[row]
            drafted = [n for n, score in enumerate(scores) if score >= 0 and depths[n] < limit]
            verified = self._pruned(row, drafted, scores)
            place_of = {ROOT: ROOT} | {n: place for place, n in enumerate(verified)}
            parents.append([place_of[int(nodes[n][0])] for n in verified])
            tokens.append([int(nodes[n][1]) for n in verified])
            sources_of_rows.append([sources[n] for n in verified])
        counts = [len(row) for row in tokens]
        device = self._levels[0].q.device
        token_ids = on_device(padded(tokens), device).view(len(tokens), max(counts))
        q = None
        if any(self._hot):
            index = on_device(padded(sources_of_rows), device).view(token_ids.shape)
            q = scatter_to_target(self._q_at(index), self._draft_to_target, self._vocab_size)
        return Proposal(to_target_ids(token_ids, self._draft_to_target), counts, q, parents)

    def _nodes(self) -> Tensor:
        """[b, nodes of all levels, 3]: parent (a node, or ROOT), token and score of each, in
        float64, which holds every value exactly."""
        before = ROOT  # the first node of the level above; above the first level there is the root
        nodes = 0
        parts = []
        for level in self._levels:
            parents = before + level.parents.repeat_interleave(level.children, dim=1)
            parts.append(torch.stack([parents, level.tokens, level.score], dim=2).double())
            before = nodes
            nodes += level.tokens.shape[1]
        return torch.cat(parts, dim=1)

    def _depths_and_sources(self) -> tuple[list[int], list[int]]:
        """Of every node its level, and which of the distributions of all levels it is from."""
        depths: list[int] = []
        sources: list[int] = []
        distributions = 0  # of the levels above
        for depth, level in enumerate(self._levels):
            width = level.tokens.shape[1]
            depths += [depth] * width
            sources += [distributions + i // level.children for i in range(width)]
            distributions += level.q.shape[1]
        return depths, sources

    def _q_at(self, sources: Tensor) -> Tensor:
        """[b, K] -> [b, K, V_draft], the distributions of these places."""
        q = torch.cat([level.q for level in self._levels], dim=1)  # [b, all w, V_draft]
        return q.gather(1, sources.unsqueeze(-1).expand(-1, -1, q.shape[-1]))


class StaticGrowth(TreeGrowth[StaticTree]):
    """Drafts and verifies the places of its tree that a row's budget holds."""

    def _selected(self, q: Tensor, score: Tensor) -> Tensor:
        budgets = on_device(self._budgets, q.device)[:, None, None]
        return to_device(self._places(q.shape[1]), q.device) < budgets

    def _places(self, w: int) -> Tensor:
        """[w, m]: which place of the tree each child of the w nodes of this level is; `budget`,
        beyond the last, where the tree has none."""
        depth = len(self._levels)
        level = self._tree.levels[depth]
        places = torch.full((w, 1 + max(rank for _, rank in level)), self._tree.budget)
        first = sum(len(above) for above in self._tree.levels[:depth])
        for place, (parent, rank) in enumerate(level, first):
            places[parent, rank] = place
        return places

    def _expanded(self, level: _Level) -> Tensor:
        depth = len(self._levels) - 1
        places = [parent * level.children + rank for parent, rank in self._tree.levels[depth]]
        frontier = [places[i] for i in self._tree.frontiers[depth]]
        return on_device(frontier, level.tokens.device).expand(len(level.tokens), -1)

    def _pruned(self, row: int, nodes: list[int], scores: Sequence[float]) -> list[int]:
        return nodes


class DynamicGrowth(TreeGrowth[DynamicTree]):
    """Drafts from the `topk` likeliest nodes of a level. A greedy row drafts all their children,
    and of all levels its budget's likeliest are verified; a sampled row draws a number that is
    dealt out to levels beforehand, and all of them are verified."""

    def _selected(self, q: Tensor, score: Tensor) -> Tensor:
        b, w, V = q.shape
        m = min(self._tree.topk, V)
        likeliest = torch.ones(b, w, m, dtype=torch.bool, device=q.device)
        if not any(self._hot):
            return likeliest
        hot = on_device(self._hot, q.device, torch.bool)[:, None, None]
        return torch.where(hot, self._dealt(q, score, m), likeliest)

    def _dealt(self, q: Tensor, score: Tensor, m: int) -> Tensor:
        """bool [b, w, m]: the children that a sampled row draws, those that most likely matter: the
        j-th does if the path to it holds and the j children before it were refused."""
        w = q.shape[1]
        sure = q.amax(-1)  # [b, w]
        refused = (1 - sure).unsqueeze(-1) ** torch.arange(m, device=q.device)
        chances = (score * sure).unsqueeze(-1) * refused
        chances[:, :, 0] = score
        depth = len(self._levels)
        draws = [
            0 if shape is None or depth >= shape.depth else shape.draws(depth)
            for shape in self._shapes
        ]
        # Of equal chances the earlier sibling comes first: a child is judged as the draw behind all
        # of its earlier siblings. Where q of a token rounds to 1, those behind it tie at 0.
        ordered = chances.flatten(1).sort(dim=1, descending=True, stable=True).indices
        best = ordered[:, : max(draws)]  # [b, most]
        dealt = on_device(draws, q.device)[:, None]  # [b, 1]
        drawn = torch.zeros(len(q), w * m, dtype=torch.bool, device=q.device)
        drawn.scatter_(1, best, torch.arange(best.shape[1], device=q.device) < dealt)
        return drawn.unflatten(1, (w, m))

    def _expanded(self, level: _Level) -> Tensor:
        width = min(self._tree.topk, level.tokens.shape[1])
        return level.score.topk(width, dim=1).indices.sort(1).values

    def _pruned(self, row: int, nodes: list[int], scores: Sequence[float]) -> list[int]:
        if self._hot[row]:
            return nodes
        # a child is never likelier than its parent, which comes first: none is left out
        likeliest = sorted(nodes, key=lambda n: -scores[n])
        return sorted(likeliest[: self._budgets[row]])


def _extended(
    paths: list[list[list[int]]], parents: Tensor, tokens: Tensor
) -> list[list[list[int]]]:
    """The paths to a new frontier: of its parents [b, w], each with its token [b, w] behind it."""
    rows = zip(paths, torch.stack([parents, tokens], 1).tolist(), strict=True)
    return [
        [[*before[parent], token] for parent, token in zip(*frontier, strict=True)]
        for before, frontier in rows
    ]


GROWTHS: dict[type, type[TreeGrowth]] = {StaticTree: StaticGrowth, DynamicTree: DynamicGrowth}
