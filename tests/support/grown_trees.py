"""Every tree that the serving code can grow from a tiny vocabulary, and the traversal of them all.

Which nodes a sampled tree has depends on the drafts above them, so the trees come from the growth
itself: each row of a batch grows by a script in place of random numbers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from draftsmith.inference.requests.request import Request
from draftsmith.inference.sampling_params import SamplingParams
from draftsmith.inference.spec_decode import tree_drafting
from draftsmith.inference.spec_decode.proposal import Proposal, padded
from draftsmith.inference.spec_decode.tree_drafting import DynamicGrowth
from draftsmith.inference.spec_decode.tree_shape import DynamicTree
from tests.support.enumeration import VOCAB, Table, chance, compare, of_traversal, prefixes

Tree = tuple[tuple[int, ...], tuple[int, ...]]  # tokens, and the parent of each


class Script:
    """In place of a row's generator: numbers by which each node of a level gets the children that
    were written down, `levels[depth][node]` in their order."""

    def __init__(self, levels: Sequence[Sequence[tuple[int, ...]]]) -> None:
        self._levels = iter(levels)
        self.q = torch.zeros(0)  # [w, V] of the level that is drafted next

    def uniforms(self, count: int) -> list[float]:
        numbers = []
        for q, tokens in zip(self.q, next(self._levels), strict=True):
            left = q.clone()
            for token in tokens:
                middle = left.cumsum(0)[token] - left[token] / 2
                numbers.append(float(middle / left.sum()))
                left[token] = 0.0
        assert len(numbers) == count
        return numbers


def grown(shape: DynamicTree, q: Table) -> dict[Tree, float]:
    """Every tree that grows where drafts are drawn from q(the drafts above), and its probability.
    Scripts that differ where nothing is drafted grow the same tree."""
    width = min(shape.topk, VOCAB)
    children = list(itertools.permutations(range(VOCAB), width))
    nodes = [1] + [width] * (shape.depth - 1)  # that are drafted from, level by level
    levels = [list(itertools.product(children, repeat=w)) for w in nodes]
    scripts = [Script(script) for script in itertools.product(*levels)]
    requests = [_request(script) for script in scripts]
    growth = DynamicGrowth(shape, requests, [shape.budget] * len(scripts), None, VOCAB)
    paths: list[list[tuple]] = [[()] for _ in scripts]
    with patch.object(tree_drafting, "uniforms", Script.uniforms):
        while True:
            for script, row in zip(scripts, paths, strict=True):
                script.q = torch.stack([q(path) for path in row])
            level = growth(torch.stack([script.q for script in scripts]).log())
            if level is None:
                break
            frontiers = torch.stack([level.parents, level.token_ids], 2).tolist()
            paths = [
                [(*before[parent], token) for parent, token in frontier]
                for before, frontier in zip(paths, frontiers, strict=True)
            ]
    proposal = growth.proposal()
    trees: dict[Tree, float] = {}
    for row, count in enumerate(proposal.counts):
        tokens = tuple(proposal.drafted[row][:count])
        parents = tuple(proposal.parents_of(row))
        trees[tokens, parents] = chance(tokens, parents, q)
        reported = proposal.q[row, :count].double()
        torch.testing.assert_close(reported, _of_parents(q, tokens, parents))
    assert sum(trees.values()) == pytest.approx(1, abs=1e-12)
    return trees


def _request(script: Any) -> Request:
    params = SamplingParams(temperature=1.0)
    return Request("0", 0, [1], params, generator=script, max_model_len=64)


def _of_parents(q: Table, tokens: Sequence[int], parents: Sequence[int]) -> torch.Tensor:
    """[nodes, V]: what each node is drawn from."""
    before = [*prefixes(tokens, parents), ()]  # the last one is that of parent -1
    return torch.stack([q(before[parent]) for parent in parents])


def enumerate_grown(
    trees: dict[Tree, float],
    p: Table,
    q: Table,
    judged: Callable[[Tree], list[int]] = lambda tree: list(range(len(tree[0]))),
) -> float:
    """Total variation of the text from the target's own, by the rule of trees. `judged`: the nodes
    of a tree that the rule is shown, their parents among them."""
    drafts: list[tuple[int, ...]] = []
    parents_of_rows: list[list[int]] = []
    p_of_rows: list[torch.Tensor] = []
    q_of_rows: list[torch.Tensor] = []
    for tree in trees:
        nodes = judged(tree)
        place_of = {-1: -1} | {node: place for place, node in enumerate(nodes)}
        tokens = tuple(tree[0][node] for node in nodes)
        parents = [place_of[tree[1][node]] for node in nodes]
        drafts.append(tokens)
        parents_of_rows.append(parents)
        p_of_rows.append(torch.stack([p(path) for path in [(), *prefixes(tokens, parents)]]))
        q_of_rows.append(_of_parents(q, tokens, parents))
    proposal = Proposal(
        torch.tensor(padded(drafts)),
        list(map(len, drafts)),
        pad_sequence(q_of_rows, batch_first=True),
        parents_of_rows,
    )
    outcomes = of_traversal(pad_sequence(p_of_rows, batch_first=True), proposal)
    distance, _ = compare(outcomes, drafts, list(trees.values()), p)
    return distance
