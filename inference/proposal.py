"""What a drafter hands to the verifier.

A plain record. It must not know how the tokens were drafted nor which rule will judge them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Proposal:
    """Drafted tokens of B rows, K at most.

    token_ids  [B, K] long; places from counts[b] on are padding (any valid token id, 0 by custom)
    counts     tokens drafted per row, each 0..K; 0 is plain decoding of that row. Given as list or tensor
    q          [B, K, V], what token_ids[b, k] was *really drawn from*, after every processor and over the
               target's whole vocabulary; None: the drafts are deterministic, q is one-hot. Padding, and rows
               whose temperature is 0, are never read
    parents    None for chains; for trees [B, K], the place of each token's parent, -1 for the root
    """

    token_ids: Tensor
    counts: list[int]
    q: Tensor | None = None
    parents: Tensor | None = None
    confidence: Tensor | None = None

    def __post_init__(self) -> None:
        if isinstance(self.counts, Tensor):
            self.counts = self.counts.tolist()
        shape = tuple(self.token_ids.shape)
        if len(shape) != 2:
            raise ValueError(f"Proposal: token_ids has shape {list(shape)}; expected [B, K]")
        if len(self.counts) != shape[0] or any(not 0 <= count <= shape[1] for count in self.counts):
            raise ValueError(f"Proposal: counts={self.counts}; expected {shape[0]} numbers between 0 and {shape[1]}")
        if self.q is not None and (self.q.dim() != 3 or self.q.shape[:2] != shape):
            raise ValueError(f"Proposal: q has shape {list(self.q.shape)}; expected [{shape[0]}, {shape[1]}, V]")

    @classmethod
    def empty(cls, rows: int, device: torch.device | str = "cpu") -> Proposal:
        """Nothing drafted: plain decoding of every row."""
        return cls(torch.zeros(rows, 0, dtype=torch.long, device=device), [0] * rows)

    @property
    def num_rows(self) -> int:
        return self.token_ids.shape[0]

    @property
    def width(self) -> int:
        """K, the longest draft there is room for."""
        return self.token_ids.shape[1]

    def select(self, rows: Sequence[int]) -> Proposal:
        """The proposal of some rows only, in the order given."""
        index = torch.tensor(rows, dtype=torch.long, device=self.token_ids.device)
        return Proposal(
            self.token_ids[index],
            [self.counts[row] for row in rows],
            None if self.q is None else self.q[index],
            None if self.parents is None else self.parents[index],
        )

    def shortened(self, width: int) -> Proposal:
        """The first `width` drafts of every row."""
        if width >= self.width:
            return self
        counts = [min(count, width) for count in self.counts]
        return Proposal(self.token_ids[:, :width], counts, None if self.q is None else self.q[:, :width])
