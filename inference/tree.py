"""Trees of drafts: who sees whom, and how they grow.

A tree hangs below the last committed token of a row; parents come before their children. Knows neither a target nor a
drafter: logits come in, tokens and their parents go out.
"""

from __future__ import annotations

import torch
from torch import Tensor

from inference.proposal import Proposal


def ancestors(proposal: Proposal, width: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Of the anchor (entry 0) and `width` places of a proposal: depths [B, 1+K] and visible bool [B, 1+K, 1+K].

    visible[b, i, j]: entry i sees entry j, which is itself, the anchor or an ancestor. Padding sees the anchor and
    itself.
    """
    B, T = proposal.num_rows, 1 + width
    depths, visible = torch.zeros(B, T, dtype=torch.long), torch.eye(T, dtype=torch.bool).repeat(B, 1, 1)
    visible[:, :, 0] = True
    assert proposal.parents is not None
    for row, parents in enumerate(proposal.parents):
        for place, parent in enumerate(parents, 1):
            depths[row, place] = depths[row, parent + 1] + 1
            visible[row, place, : parent + 2] |= visible[row, parent + 1, : parent + 2]
    return depths.to(device), visible.to(device)
