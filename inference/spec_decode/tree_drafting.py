"""How trees of drafts grow, level by level.

A tree hangs below the last committed token of a row; parents come before their children. Knows
neither a target nor a drafter: logits come in, tokens and their parents go out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.inference.requests.request import Request
from draftsmith.inference.sampling.sampler import batch_probabilities, inverse_cdf, uniforms
from draftsmith.inference.sampling_params import SamplingParams
from draftsmith.inference.spec_decode.logits import active_rows, process_draft_logits
from draftsmith.inference.spec_decode.proposal import Proposal, padded
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


class TreeGrowth:
    """One round's trees, a `Drafter.draft_tree` callback: draft logits in, the next level out; then
    `proposal`.

    Rows at temperature 0, and all if not `probabilistic`, take the likeliest children. The others
    draw theirs without replacement, and every child that is drawn is verified: how many a node gets
    is decided before the first is drawn, from q and the way to the node, so that no draft's own
    value decides whether it is judged."""

    def __init__(
        self,
        tree: TreeShape,
        requests: Sequence[Request],
        limits: Sequence[int],
        draft_to_target: Tensor | None,
        vocab_size: int,
        *,
        probabilistic: bool = True,
    ) -> None:
        """`limits`: nodes of each row at most, 0 for a row without a tree. `vocab_size`: the
        target's."""
        self._tree, self._requests = tree, requests
        self._shapes = [tree.cut(limit) if limit else None for limit in limits]  # of each row
        self._budgets = [0 if shape is None else shape.budget for shape in self._shapes]
        self._limits = [0 if shape is None else shape.depth for shape in self._shapes]  # levels
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
            above = q.new_ones(b, w)
        else:
            parents = self._frontier
            above = self._levels[-1].score.gather(1, parents)
        score = above.clamp(min=0)  # no child of a node that was not drafted would be verified
        selected = self._selected(q, score)
        likeliest = q.topk(min(selected.shape[2], q.shape[-1]), dim=-1)
        tokens, real = likeliest.indices, likeliest.values > 0  # [b, w, m]
        if any(self._hot):
            hot = on_device(self._hot, q.device, torch.bool)[:, None, None]
            drawn, exists = self._drawn(q, *selected.shape[1:])
            tokens, real = torch.where(hot, drawn, tokens), torch.where(hot, exists, real)
        score = score[..., None] * q.gather(2, tokens).clamp(max=1)
        score = torch.where((above >= 0)[..., None] & selected & real, score, -1.0)
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

    def _selected(self, q: Tensor, score: Tensor) -> Tensor:
        """bool [b, w, m]: which children of the frontier to draft, decided by q [b, w, V_draft] and
        the scores [b, w] of the frontier alone. A static tree drafts the places that a row's budget
        holds; a dynamic tree drafts all, and for a sampled row a number that is dealt out to levels
        beforehand."""
        (b, w, V), tree, depth = q.shape, self._tree, len(self._levels)
        if isinstance(tree, StaticTree):
            budgets = on_device(self._budgets, q.device)[:, None, None]
            return to_device(self._static_places(tree, w), q.device) < budgets
        m = min(tree.topk, V)
        selected = torch.ones(b, w, m, dtype=torch.bool, device=q.device)
        if not any(self._hot):
            return selected
        # the j-th child matters if the path to it holds and the j children before it were refused
        sure = q.amax(-1)  # [b, w]
        refused = (1 - sure).unsqueeze(-1) ** torch.arange(m, device=q.device)
        chances = (score * sure).unsqueeze(-1) * refused
        chances[:, :, 0] = score
        draws = [
            shape.draws(depth) if isinstance(shape, DynamicTree) and depth < shape.depth else 0
            for shape in self._shapes
        ]
        best = chances.flatten(1).topk(min(max(draws), w * m), dim=1).indices  # [b, most]
        dealt = on_device(draws, q.device)[:, None]  # [b, 1]
        drawn = torch.zeros(b, w * m, dtype=torch.bool, device=q.device)
        drawn.scatter_(1, best, torch.arange(best.shape[1], device=q.device) < dealt)
        hot = on_device(self._hot, q.device, torch.bool)[:, None, None]
        return torch.where(hot, drawn.unflatten(1, (w, m)), selected)

    def _static_places(self, tree: StaticTree, w: int) -> Tensor:
        """[w, m]: which place of the tree each child of the w nodes of this level is; `budget`,
        beyond the last, where the tree has none."""
        depth = len(self._levels)
        level = tree.levels[depth]
        places = torch.full((w, 1 + max(rank for _, rank in level)), tree.budget)
        first = sum(len(above) for above in tree.levels[:depth])
        for place, (parent, rank) in enumerate(level, first):
            places[parent, rank] = place
        return places

    def _expanded(self, level: _Level) -> Tensor:
        """[b, w] ascending: the places of the level to draft from next; of a dynamic tree the
        `topk` likeliest."""
        tree, depth = self._tree, len(self._levels) - 1
        if isinstance(tree, StaticTree):
            places = [parent * level.children + rank for parent, rank in tree.levels[depth]]
            frontier = [places[i] for i in tree.frontiers[depth]]
            return on_device(frontier, level.tokens.device).expand(len(level.tokens), -1)
        wide = min(tree.topk, level.tokens.shape[1])
        return level.score.topk(wide, dim=1).indices.sort(1).values

    def proposal(self) -> Proposal:
        """The trees as grown: parents first, siblings as they were drafted; of a dynamic tree's
        greedy row the likeliest nodes that its budget holds."""
        device = self._levels[0].q.device
        depths: list[int] = []
        sources: list[int] = []  # which of all levels' distributions a draft is from
        before, parts = ROOT, []
        for depth, level in enumerate(self._levels):
            parents = before + level.parents.repeat_interleave(level.children, dim=1)
            # float64 holds every value exactly
            parts.append(torch.stack([parents, level.tokens, level.score], dim=2).double())
            before, first = len(depths), sources[-1] + 1 if sources else 0
            depths += [depth] * level.tokens.shape[1]
            sources += [first + i // level.children for i in range(level.tokens.shape[1])]
        rows: list[list[int]] = []
        parents_of_rows, tokens_of_rows = [], []
        grown = torch.cat(parts, dim=1).tolist()  # one copy from the device
        for nodes, limit, budget, hot in zip(
            grown, self._limits, self._budgets, self._hot, strict=True
        ):
            row = [n for n, (*_, score) in enumerate(nodes) if score >= 0 and depths[n] < limit]
            if isinstance(self._tree, DynamicTree) and not hot:
                # a child is never likelier than its parent, which comes first: none is left out
                likeliest = sorted(row, key=lambda n: -nodes[n][2])
                row = sorted(likeliest[:budget])
            place_of = {ROOT: ROOT} | {n: place for place, n in enumerate(row)}
            rows.append([sources[n] for n in row])
            parents_of_rows.append([place_of[int(nodes[n][0])] for n in row])
            tokens_of_rows.append([int(nodes[n][1]) for n in row])
        counts = list(map(len, rows))
        tokens = on_device(padded(tokens_of_rows), device).view(len(rows), max(counts))
        q = None
        if any(self._hot):
            every = torch.cat([level.q for level in self._levels], dim=1)  # [b, all w, V_draft]
            index = on_device(padded(rows), device).view(tokens.shape).unsqueeze(-1)
            q = every.gather(1, index.expand(-1, -1, every.shape[-1]))
            q = scatter_to_target(q, self._ids, self._vocab_size)
        return Proposal(to_target_ids(tokens, self._ids), counts, q, parents_of_rows)
