"""Every family drafts trees: the logits after each draft are those of a chain of the tokens that
lead to it, and what comes out of the runtime is the target's own."""

from __future__ import annotations

import torch

from draftsmith.inference.kv_cache.ragged_cache import RaggedCache
from draftsmith.speculators.drafter import DraftInput, TreeLevel
from tests.support.contract import draft_logits


@torch.no_grad()
def test_a_tree_is_as_many_chains(world):
    """Two rows of different length, a tree of three levels in which siblings and cousins must not
    see each other."""
    target, drafter = world
    texts = [[5, 9, 2, 7, 11, 3], [4, 8, 15]]
    levels = [
        ([[10, 20], [12, 22]], [[0, 0], [0, 0]]),
        ([[30, 31, 32], [33, 34, 35]], [[0, 0, 1], [0, 1, 1]]),
    ]
    deepest = 3 if drafter.max_depth is None else min(3, drafter.max_depth)
    levels = levels[: deepest - 1]
    paths: list[list[list[int]]] = [[[]], [[]]]
    grown, visible, last = [], None, [[[]], [[]]]
    for tokens, parents in levels:
        last = [
            [[*last[b][p], t] for t, p in zip(tokens[b], parents[b], strict=True)] for b in range(2)
        ]
        for b in range(2):
            paths[b] += last[b]
        index = torch.tensor(parents)
        own = torch.eye(index.shape[1], dtype=torch.bool).expand(2, -1, -1)
        if visible is not None:
            before = visible.gather(1, index.unsqueeze(-1).expand(-1, -1, visible.shape[-1]))
            own = torch.cat([before, own], 2)
        visible = own
        grown.append(TreeLevel(torch.tensor(tokens), index, visible))
    steps, seen = iter([*grown, None]), []

    def grow(logits):
        seen.append(logits)
        return next(steps)

    cache, width = RaggedCache(2, 128), 6
    ids = torch.tensor([text + [0] * (width - len(text)) for text in texts])
    taps, last_hidden = target(ids)
    first = drafter.first_token
    counts = [len(text) - first for text in texts]
    longest = max(counts)
    taps = None if taps is None else taps[:, :longest]
    token_ids = ids[:, first : first + longest]
    drafter.draft_tree(
        DraftInput(cache, 0, 2, token_ids, taps, last_hidden[:, :longest], counts), deepest, grow
    )
    assert cache.lengths == counts  # the drafts are rolled back
    by_row = [[step[b, i] for step in seen for i in range(step.shape[1])] for b in range(2)]
    expected = []
    for text, row in zip(texts, paths):
        for path in row:
            forced = torch.tensor([*path, *[0] * deepest])
            logits = draft_logits(world, torch.tensor(text), len(text) - 2, deepest, forced)
            expected.append(logits[len(path)])
    got = by_row[0] + by_row[1]
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
