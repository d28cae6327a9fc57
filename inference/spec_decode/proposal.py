"""The proposal that a drafter hands to the verifier.

A plain record. It must not know how the tokens were drafted nor which rule will judge them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from draftsmith.speculators.precision import on_device


@dataclass
class Proposal:
    """Drafted tokens of B rows, K nodes at most: a chain per row, or with `parents` a tree.

    token_ids  [B, K] long; nodes from counts[b] on are padding (any valid token id, 0 by custom)
               or unverified
    counts     tokens drafted per row, each 0..K; 0 is plain decoding of that row
    q          [B, K, V], what token_ids[b, k] was *really drawn from*, after every processor and
               over the target's whole vocabulary; None: the drafts are deterministic, q is one-hot.
               Padding, and rows whose temperature is 0, are never read. Siblings of a tree are
               drawn one after the other without replacement, in the order of their nodes, and all
               have the q of the first one
    parents    None for chains; for trees, per row the node of each token's parent, -1 for the root
               (the last committed token): counts[b] + unverified[b] numbers, parents before their
               children
    unverified nodes per row, after the judged ones, that the target computes but nobody judges:
               each sees the committed text, its ancestors and itself, and leaves nothing behind
    confidence  [B, K] or None: of chains, how sure the proposer was of each draft before it was
               drawn, for whoever chooses lengths; never read by a rule
    methods    per row the method that drafted, where there are several; for counters
    """

    token_ids: Tensor
    counts: list[int]
    q: Tensor | None = None
    parents: list[list[int]] | None = None
    unverified: list[int] | None = None
    confidence: Tensor | None = None
    methods: list[str] | None = None

    def __post_init__(self) -> None:
        B, K = self.token_ids.shape
        if len(self.counts) != B or any(not 0 <= count <= K for count in self.counts):
            raise ValueError(
                f"Proposal: counts={self.counts}; expected {B} numbers between 0 and {K}"
            )
        if self.q is not None and self.q.shape[:-1] != (B, K):
            raise ValueError(f"Proposal: q has shape {list(self.q.shape)}; expected [{B}, {K}, V]")
        for row, parents in enumerate(self.parents or ()):
            nodes = self.counts[row] + (self.unverified[row] if self.unverified else 0)
            if len(parents) != nodes or any(
                not -1 <= parent < k for k, parent in enumerate(parents)
            ):
                raise ValueError(
                    f"Proposal: parents {parents}; expected {nodes} numbers, -1 or an earlier node"
                )

    @classmethod
    def empty(cls, rows: int, device: torch.device | str = "cpu") -> Proposal:
        """Nothing drafted: plain decoding of every row."""
        return cls(torch.zeros(rows, 0, dtype=torch.long, device=device), [0] * rows)

    @classmethod
    def deterministic(
        cls,
        drafts: Sequence[list[int]],
        device: torch.device | str = "cpu",
        *,
        parents: Sequence[list[int]] | None = None,
        unverified: list[int] | None = None,
        confidence: Sequence[list[float]] | None = None,
    ) -> Proposal:
        """Drafts per row, of any lengths, and how sure each is; the last unverified[b] of row b are
        unverified."""
        width = max(map(len, drafts))
        if width == 0:
            return cls.empty(len(drafts), device)
        proposal = cls(
            on_device(padded(drafts), torch.device(device)),
            [len(row) - extra for row, extra in zip(drafts, unverified or [0] * len(drafts))],
            parents=None if parents is None else list(parents),
            unverified=unverified,
        )
        if confidence is not None:
            proposal.confidence = torch.tensor(padded(confidence), dtype=torch.float64)
        proposal.drafted = padded(drafts)
        return proposal

    @property
    def num_rows(self) -> int:
        """B, the rows of the batch, those without a draft included."""
        return self.token_ids.shape[0]

    @property
    def width(self) -> int:
        """K, the longest draft there is room for."""
        return self.token_ids.shape[1]

    @cached_property
    def drafted(self) -> list[list[int]]:
        """token_ids on the host: the device is waited for once, however many ask."""
        return self.token_ids.tolist() if self.width else [[] for _ in self.counts]

    def paths(self, row: int) -> list[list[int]]:
        """The drafted tokens that lead to each judged node of the row: entry j to that of logits
        [row, j], counts[row] + 1 of them. The first is [], the node after the committed text."""
        paths: list[list[int]] = [[]]
        for parent, token in zip(self.parents_of(row), self.drafted[row], strict=False):
            paths.append([*paths[parent + 1], token])
        return paths

    def select(self, rows: Sequence[int]) -> Proposal:
        """The proposal of some rows only, in the order given."""
        index = on_device(rows, self.token_ids.device)
        return Proposal(
            self.token_ids[index],
            [self.counts[row] for row in rows],
            None if self.q is None else self.q[index],
            None if self.parents is None else [self.parents[row] for row in rows],
            None if self.unverified is None else [self.unverified[row] for row in rows],
        )

    def parents_of(self, row: int) -> list[int]:
        """The parent of each judged node of the row: a node, or -1 for the root."""
        count = self.counts[row]
        return list(range(-1, count - 1)) if self.parents is None else self.parents[row][:count]

    def children(self, row: int) -> dict[int, list[int]]:
        """Maps every verified node that has drafts behind it, and -1, to the nodes of these
        drafts, in order."""
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(self.parents_of(row)):
            children.setdefault(parent, []).append(node)
        return children

    def depths(self) -> list[list[int]]:
        """Per row and node, judged or not, how many tokens after the committed text it stands:
        1, 2, ..."""
        depths_of_rows = []
        for row in range(self.num_rows):
            depths = [0]  # of the root, and node by node
            for parent in self.parents_of(row) if self.parents is None else self.parents[row]:
                depths.append(1 + depths[1 + parent])
            depths_of_rows.append(depths[1:])
        return depths_of_rows

    def shortened(self, width: int) -> Proposal:
        """The first `width` drafts of every row."""
        if width >= self.width:
            return self
        counts = [min(count, width) for count in self.counts]
        return Proposal(
            self.token_ids[:, :width], counts, None if self.q is None else self.q[:, :width]
        )


def padded(rows: Sequence[Sequence], width: int | None = None) -> list[list]:
    """Every row as long as the longest one, or `width`, with zeros behind it."""
    width = max(map(len, rows)) if width is None else width
    return [[*row, *[0] * (width - len(row))] for row in rows]


class Kept(NamedTuple):
    """The tokens a row commits: the drafts at `nodes` of its proposal, in this order, then one of
    the target's own."""

    nodes: list[int]
    tokens: list[int]
