"""The forward of a target over trees of drafts: positions, and who sees whom.

A tree hangs below the last committed token of a row; parents come before their children."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from draftsmith.inference.kv_cache.ragged_cache import RaggedCache
from draftsmith.inference.spec_decode.proposal import Proposal
from draftsmith.inference.spec_decode.verification.tree_rules import ROOT
from draftsmith.speculators.precision import on_device, to_device


def tree_inputs(
    cache: RaggedCache, start: int, stop: int, proposal: Proposal, width: int
) -> tuple[Tensor, Tensor, Tensor]:
    """For the anchors of rows [start, stop) and `width` nodes of their trees: position ids [b,
    1+K], mask [b, 1, 1+K, S] and the positions of the keys [b, S]."""
    lengths = cache.lengths[start:stop]
    depths, visible = ancestors(proposal, width, cache.device)
    first = on_device(lengths, cache.device)[:, None]  # [b, 1]
    mask, index = cache.tree_mask(start, stop, lengths, visible)
    key_depths = torch.where(index < 0, index, depths.gather(1, index.clamp(0, width)))
    return first + depths, mask, first + key_depths


def ancestors(proposal: Proposal, width: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Of the anchor (entry 0) and `width` nodes of a proposal: depths [B, 1+K] and visible bool
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
    for node in range(1, T):
        above = parents[:, node - 1] + 1
        depths[:, node] = np.where(used[:, node - 1], depths[rows, above] + 1, 0)
        visible[:, node] |= visible[rows, above]
    device = torch.device(device)
    return to_device(torch.from_numpy(depths), device), to_device(torch.from_numpy(visible), device)


def along(nodes: Sequence[Sequence[int]], features: Tensor) -> Tensor:
    """Features [b, 1+K, ·] of the last committed token and of every node -> [b, T, ·] at the
    nodes kept."""
    width = max(map(len, nodes))
    index = on_device([[*row, *[0] * (width - len(row))] for row in nodes], features.device)
    return features.gather(1, index.unsqueeze(-1).expand(-1, -1, features.shape[-1]))
