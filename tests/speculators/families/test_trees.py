"""Every family drafts trees: the logits after each draft are those of a chain of the tokens that
lead to it, and what comes out of the runtime is the target's own."""

from __future__ import annotations

import pytest
import torch

from draftsmith.speculators.drafter import TreeLevel
from tests.support.cases import BASE, world_of
from tests.support.contract import draft_input, draft_logits


@pytest.mark.parametrize("name", [*BASE.values(), "eagle3, two layers, window"])
@torch.no_grad()
def test_a_tree_is_as_many_chains(name):
    world = world_of(name)
    drafter = world[1]
    texts = [[5, 9, 2, 7, 11, 3], [4, 8, 15]]
    levels = [
        ([[10, 20], [12, 22]], [[0, 0], [0, 0]]),
        ([[30, 31, 32], [33, 34, 35]], [[0, 0, 1], [0, 1, 1]]),
    ]
    deepest = 3 if drafter.max_depth is None else min(3, drafter.max_depth)
    levels = levels[: deepest - 1]
    paths: list[list[list[int]]] = [[[]], [[]]]
    grown, visible, above = [], None, [[[]], [[]]]
    for tokens, parents in levels:
        for b in range(2):
            above[b] = [[*above[b][p], t] for t, p in zip(tokens[b], parents[b], strict=True)]
            paths[b] += above[b]
        index = torch.tensor(parents)
        ancestors = torch.eye(index.shape[1], dtype=torch.bool).expand(2, -1, -1)
        if visible is not None:
            before = visible.gather(1, index.unsqueeze(-1).expand(-1, -1, visible.shape[-1]))
            ancestors = torch.cat([before, ancestors], 2)
        visible = ancestors
        grown.append(TreeLevel(torch.tensor(tokens), index, visible))
    steps, seen = iter([*grown, None]), []

    def grow(logits):
        seen.append(logits)
        return next(steps)

    inputs = draft_input(world, [torch.tensor(text) for text in texts])
    drafter.draft_tree(inputs, deepest, grow)
    assert inputs.cache.lengths == inputs.counts  # the drafts are rolled back
    for text, row, row_logits in zip(texts, paths, torch.cat(seen, 1), strict=True):
        for path, logits in zip(row, row_logits, strict=True):
            forced = torch.tensor([*path, *[0] * deepest])
            chain = draft_logits(world, torch.tensor(text), len(text) - 2, deepest, forced)
            torch.testing.assert_close(logits, chain[len(path)], rtol=1e-4, atol=1e-5)
