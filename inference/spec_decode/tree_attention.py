"""The forward of a target over trees of drafts: positions, and who sees whom.

A tree hangs below the last committed token of a row; parents come before their children."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from draftsmith.inference.spec_decode.proposal import Proposal, padded
from draftsmith.speculators.precision import on_device, to_device
from draftsmith.speculators.target.ragged_rows import TreePlaces


def tree_places(proposal: Proposal, device: torch.device) -> TreePlaces | None:
    """Anchors and nodes of a proposal as the target reads them, K the longest tree; None where they
    are chains."""
    if proposal.parents is None or not proposal.width:
        return None
    return TreePlaces(*ancestors(proposal, proposal.width, device))


def ancestors(proposal: Proposal, width: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Of the anchor (entry 0) and `width` nodes of a proposal: depths [B, 1+K] and visible bool
    [B, 1+K, 1+K].

    visible[b, i, j]: entry i sees entry j, which is itself, the anchor or an ancestor. Padding sees
    the anchor and itself."""
    assert proposal.parents is not None
    above = np.array(padded([[1 + parent for parent in row] for row in proposal.parents], width))
    rows = np.arange(proposal.num_rows)
    visible = np.eye(1 + width, dtype=bool)[None].repeat(len(rows), axis=0)
    visible[:, :, 0] = True
    for node in range(width):
        visible[:, 1 + node] |= visible[rows, above[:, node]]
    depths = padded([[0, *row] for row in proposal.depths()], 1 + width)
    device = torch.device(device)
    return on_device(depths, device), to_device(torch.from_numpy(visible), device)


def along(nodes: Sequence[Sequence[int]], features: Tensor) -> Tensor:
    """Features [b, 1+K, ·] of the last committed token and of every node -> [b, T, ·] at the
    nodes kept."""
    index = on_device(padded(nodes), features.device)
    return features.gather(1, index.unsqueeze(-1).expand(-1, -1, features.shape[-1]))
