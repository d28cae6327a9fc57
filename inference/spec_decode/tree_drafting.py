"""Trees of drafts: who sees whom, and how they grow level by level.

A tree hangs below the last committed token of a row; parents come before their children. Knows
neither a target nor a drafter: logits come in, tokens and their parents go out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from inference.requests.request import Request
from inference.sampling.sampler import batch_probabilities, inverse_cdf, uniforms
from inference.sampling_params import SamplingParams
from inference.spec_decode.logits import process_draft_logits
from inference.spec_decode.proposal import Proposal
from inference.spec_decode.tree_shape import StaticTree, TreeShape, best_first
from inference.spec_decode.verification.tree_rules import ROOT
from speculators.drafter import TreeLevel
from speculators.precision import on_device
from speculators.vocab.draft_vocab import scatter_to_target, to_target_ids


def ancestors(proposal: Proposal, width: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Of the anchor (entry 0) and `width` places of a proposal: depths [B, 1+K] and visible bool
    [B, 1+K, 1+K].

    visible[b, i, j]: entry i sees entry j, which is itself, the anchor or an ancestor. Padding sees
    the anchor and itself."""
    B, T = proposal.num_rows, 1 + width
    assert proposal.parents is not None
    parents = np.array(
        [row + [ROOT] * (width - len(row)) for row in proposal.parents], dtype=np.int64
    ).reshape(B, width)
    used = np.array([[len(row)] for row in proposal.parents]) > np.arange(width)  # [B, K]
    rows, depths = np.arange(B), np.zeros((B, T), dtype=np.int64)
    visible = np.eye(T, dtype=bool)[None].repeat(B, axis=0)
    visible[:, :, 0] = True
    for place in range(1, T):
        above = parents[:, place - 1] + 1
        depths[:, place] = np.where(used[:, place - 1], depths[rows, above] + 1, 0)
        visible[:, place] |= visible[rows, above]
    device = torch.device(device)
    return on_device(depths, device), on_device(visible, device, torch.bool)


@dataclass
class _Level:
    """n nodes of one depth, drafted after w of the depth before.

    tokens   [b, n] in the drafter's vocabulary
    source   [b, n] which of the w each was drafted after
    parent   [b, n] which node of the level before that is
    score    [b, n] product of the drafter's probabilities on the way
    alive    bool [b, n]: it was drafted, and so was its parent
    q        [b, w, V_draft] what was drafted from
    """

    tokens: Tensor
    source: Tensor
    parent: Tensor
    score: Tensor
    alive: Tensor
    q: Tensor


class TreeGrowth:
    """One round's trees, a `Drafter.draft_tree` callback: draft logits in, the next level out; then
    `proposal`.

    Rows at temperature 0, and all if not `probabilistic`, take the likeliest children. The others
    draw theirs without replacement, and every child that is drawn is verified: how many a node gets
    is decided before the first is drawn, from q and the way to the node, so that no draft's own
    value decides whether it is judged."""

    def __init__(
        self,
        shape: TreeShape,
        requests: Sequence[Request],
        limits: Sequence[int],
        draft_to_target: Tensor | None,
        vocab_size: int,
        *,
        probabilistic: bool = True,
    ) -> None:
        """`vocab_size`: the target's."""
        self._shape, self._requests = shape, requests
        self._ids, self._vocab_size = draft_to_target, vocab_size
        self._limits = [min(limit, shape.depth) for limit in limits]
        self._hot = [probabilistic and not request.params.greedy for request in requests]
        cold = SamplingParams()
        self._params = [cold if request.params.greedy else request.params for request in requests]
        self._levels: list[_Level] = []
        self._frontier: Tensor | None = (
            None  # [b, w], nodes of the last level that are drafted from
        )
        self._visible: Tensor | None = None  # bool [b, w, drafts drafted from so far]
        processed = any(request.processors.active(len(request.token_ids)) for request in requests)
        self._paths: list[list[list[int]]] | None = (
            [[[]] for _ in requests] if processed else None
        )  # to the frontier

    def __call__(self, logits: Tensor) -> TreeLevel | None:
        """Draft logits [b, w, V_draft] after each of the frontier -> what to draft from next; None
        at the end."""
        if self._paths is not None:
            logits = process_draft_logits(
                logits, self._requests, self._paths, self._ids, self._vocab_size
            )
        q = batch_probabilities(logits, self._params)
        level = self._static(q) if isinstance(self._shape, StaticTree) else self._dynamic(q)
        self._levels.append(level)
        depth = len(self._levels)
        if depth == max(self._limits):
            return None
        if isinstance(self._shape, StaticTree):
            places = on_device(self._shape.frontiers[depth - 1], q.device)
            frontier = places.expand(len(self._requests), -1)
        else:
            wide = min(self._shape.topk, level.tokens.shape[1])
            frontier = (
                level.score.masked_fill(~level.alive, -1.0).topk(wide, dim=1).indices.sort(1).values
            )
        parents = level.source.gather(1, frontier)
        self._frontier, self._visible = frontier, self._seen_by(parents)
        tokens = to_target_ids(level.tokens.gather(1, frontier), self._ids)
        if self._paths is not None:
            self._paths = [
                [[*before[parent], token] for parent, token in zip(*row, strict=True)]
                for before, row in zip(
                    self._paths, torch.stack([parents, tokens], 1).tolist(), strict=True
                )
            ]
        return TreeLevel(tokens, parents, self._visible)

    def _seen_by(self, parents: Tensor) -> Tensor:
        """[b, w] places in the frontier before -> bool [b, w, n + w], what each of the new frontier
        sees."""
        b, w = parents.shape
        own = torch.eye(w, dtype=torch.bool, device=parents.device).expand(b, -1, -1)
        if self._visible is None:
            return own
        before = self._visible.gather(
            1, parents.unsqueeze(-1).expand(-1, -1, self._visible.shape[-1])
        )
        return torch.cat([before, own], dim=2)

    def _static(self, q: Tensor) -> _Level:
        assert isinstance(self._shape, StaticTree)
        nodes = self._shape.levels[len(self._levels)]
        source = on_device([parent for parent, _ in nodes], q.device).expand(len(q), -1)
        rank = on_device([rank for _, rank in nodes], q.device).expand(len(q), -1)
        wanted = torch.zeros(
            q.shape[1], 1 + max(rank for _, rank in nodes), dtype=torch.bool, device=q.device
        )
        wanted[source[0], rank[0]] = True
        return self._level(q, wanted.expand(len(q), -1, -1), source, rank)

    def _dynamic(self, q: Tensor) -> _Level:
        """Candidates: topk children of everything in the frontier; of a sampled row those that are
        worth a draw."""
        assert not isinstance(self._shape, StaticTree)
        b, w, V = q.shape
        ranks = min(self._shape.topk, V)
        source = torch.arange(w, device=q.device).repeat_interleave(ranks).expand(b, -1)
        rank = torch.arange(ranks, device=q.device).repeat(w).expand(b, -1)
        wanted = torch.ones(b, w, ranks, dtype=torch.bool, device=q.device)
        if any(self._hot):
            # the j-th child matters if the path to it holds and the j children before it were
            # refused
            sure = q.amax(-1)  # [b, w]
            path = self._path_scores(q)
            chances = (path * sure).unsqueeze(-1) * (1 - sure).unsqueeze(-1) ** torch.arange(
                ranks, device=q.device
            )
            chances[:, :, 0] = path
            best = chances.flatten(1).topk(
                min(self._shape.draws(len(self._levels)), w * ranks), dim=1
            )
            taken = torch.ones_like(best.indices, dtype=torch.bool)
            drawn = torch.zeros(b, w * ranks, dtype=torch.bool, device=q.device).scatter_(
                1, best.indices, taken
            )
            hot = on_device(self._hot, q.device, torch.bool)[:, None, None]
            wanted = torch.where(hot, drawn.unflatten(1, (w, ranks)), wanted)
        return self._level(q, wanted, source, rank)

    def _level(self, q: Tensor, wanted: Tensor, source: Tensor, rank: Tensor) -> _Level:
        """wanted bool [b, w, m]: children to draft; source, rank [b, n]: the nodes of the level
        among [w, m]."""
        m = wanted.shape[2]
        likeliest = q.topk(min(m, q.shape[-1]), dim=-1)
        tokens, real = likeliest.indices, likeliest.values > 0  # [b, w, m]
        if any(self._hot):
            hot = on_device(self._hot, q.device, torch.bool)[:, None, None]
            drawn, found = self._draw(q, wanted)
            tokens, real = torch.where(hot, drawn, tokens), torch.where(hot, found, real)
        place = source * m + rank  # [b, n] in [w·m]
        chosen = tokens.flatten(1).gather(1, place)
        alive = (wanted & real).flatten(1).gather(1, place)
        chance = q.gather(2, tokens).flatten(1).gather(1, place)
        before = self._path_scores(q).gather(1, source)
        if self._frontier is None:
            parent = source
        else:
            parent = self._frontier.gather(1, source)
            alive = alive & self._levels[-1].alive.gather(1, parent)
        return _Level(chosen, source, parent, before * chance, alive, q)

    def _path_scores(self, q: Tensor) -> Tensor:
        """[b, w] of the frontier; 0 below a node that was not drafted, where no child would be
        verified either."""
        if self._frontier is None:
            return q.new_ones(q.shape[:2])
        level = self._levels[-1]
        return level.score.masked_fill(~level.alive, 0.0).gather(1, self._frontier)

    def _draw(self, q: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
        """Children [b, w, m] in turn, without replacement, and whether there was one to draw. A row
        takes one number per place of the level, whatever the others do, and none below its own
        limit."""
        b, w, m = wanted.shape
        depth = len(self._levels)
        numbers = [
            uniforms(request.generator, w * m) if hot and depth < limit else [0.0] * (w * m)
            for request, hot, limit in zip(self._requests, self._hot, self._limits, strict=True)
        ]
        noise = on_device(numbers, q.device, torch.float64).view(b * w, m)
        left, tokens, found = q.flatten(0, 1).clone(), [], []
        for j in range(m):
            token = inverse_cdf(left, noise[:, j])
            found.append(token < q.shape[-1])
            tokens.append(token.clamp(max=q.shape[-1] - 1))
            left.scatter_(1, tokens[-1].unsqueeze(1), 0.0)
        return torch.stack(tokens, 1).view(b, w, m), torch.stack(found, 1).view(b, w, m)

    def proposal(self) -> Proposal:
        """The trees as grown."""
        levels, device = self._levels, self._levels[0].q.device
        rows = _Grown.all_of(levels)
        chosen = self._chosen(rows)
        counts = [len(nodes) for nodes in chosen]
        width = max(counts)
        tokens = [[0] * width for _ in rows]
        frontier = [[0] * width for _ in rows]  # which of all distributions each was drawn from
        offsets = [0, *accumulate(level.q.shape[1] for level in levels)]
        parents = []
        for row, (grown, nodes) in enumerate(zip(rows, chosen, strict=True)):
            places = {node: place for place, node in enumerate(nodes)}
            parents.append([places[(d - 1, grown.parent[d][i])] if d else -1 for d, i in nodes])
            for place, (d, i) in enumerate(nodes):
                tokens[row][place] = grown.tokens[d][i]
                frontier[row][place] = offsets[d] + grown.source[d][i]
        token_ids = to_target_ids(on_device(tokens, device), self._ids)
        if not any(self._hot):
            return Proposal(token_ids, counts, None, parents)
        every = torch.cat([level.q for level in levels], dim=1)  # [b, all w, V_draft]
        index = on_device(frontier, device).unsqueeze(-1).expand(-1, -1, every.shape[-1])
        q = every.gather(1, index)
        q = scatter_to_target(q, self._ids, self._vocab_size)
        return Proposal(token_ids, counts, q, parents)

    def _chosen(self, rows: Sequence[_Grown]) -> list[list[tuple[int, int]]]:
        """Of each row the nodes (depth, place in its level) that are verified, parents first,
        siblings as they were drafted."""
        shape = self._shape
        whole = [isinstance(shape, StaticTree) or hot for hot in self._hot]
        chosen = [
            (
                [node for node in grown.nodes() if node[0] < limit]
                if whole[row]
                else grown.best(limit, shape.budget)
            )
            for row, (grown, limit) in enumerate(zip(rows, self._limits, strict=True))
        ]
        return [sorted(nodes) for nodes in chosen]


@dataclass
class _Grown:
    """One row's levels on the host: lists by depth."""

    tokens: list[list[int]]
    source: list[list[int]]
    parent: list[list[int]]
    score: list[list[float]]
    alive: list[list[bool]]

    @classmethod
    def all_of(cls, levels: list[_Level]) -> list[_Grown]:
        """The trees of all rows, in one copy from the device; float64 holds every value exactly."""
        names = ("tokens", "source", "parent", "score", "alive")
        every = torch.stack(
            [torch.cat([getattr(level, name).double() for level in levels], 1) for name in names]
        )
        ends = np.cumsum([level.tokens.shape[1] for level in levels])[:-1]
        types = (np.int64, np.int64, np.int64, np.float64, np.bool_)
        fields = zip(every.cpu().numpy(), types, strict=True)  # [B, nodes of all levels] each
        parts = [
            [part.tolist() for part in np.split(field.astype(kind), ends, axis=1)]
            for field, kind in fields
        ]
        return [
            cls(*([part[row] for part in field] for field in parts))
            for row in range(every.shape[1])
        ]

    def best(self, deepest: int, budget: int) -> list[tuple[int, int]]:
        """The `budget` nodes of the highest scores above a depth, from the highest on."""
        children: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for d, i in self.nodes():
            children.setdefault((d - 1, self.parent[d][i] if d else 0), []).append((d, i))

        def edges(node: tuple[int, int] | None) -> Iterator[tuple[float, tuple[int, int]]]:
            for child in children.get(node or (-1, 0), ()):
                if child[0] < deepest:
                    yield self.score[child[0]][child[1]], child

        return best_first(edges, budget)

    def nodes(self) -> list[tuple[int, int]]:
        """Those that were drafted, by depth."""
        return [
            (d, i)
            for d, alive in enumerate(self.alive)
            for i, drafted in enumerate(alive)
            if drafted
        ]
