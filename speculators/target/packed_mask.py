"""Who may attend to whom in a row that holds several texts, and branches that leave them.

A branch is a run of tokens that were drafted after some slot of a text, its fork, and not kept: to each of them the
text goes on with the branch instead of with what the row holds after the fork. Knows tensors of slots only.
"""

from __future__ import annotations

import torch
from torch import Tensor


def packed_mask(segment_ids: Tensor, forks: Tensor | None = None) -> Tensor | None:
    """bool [B, 1, T, T], True = attend; None where plain causal attention says the same.

    segment_ids [B, T]: the text a token belongs to; -1: padding, or a branch. forks [B, T]: the slot after which a
    token's branch leaves its text, -1 for tokens of no branch; no two branches of a row have the same.
    """
    slots = torch.arange(segment_ids.shape[1], device=segment_ids.device).expand_as(segment_ids)
    if forks is None:
        starts = (segment_ids[:, 1:] != segment_ids[:, :-1]) & (segment_ids[:, 1:] >= 0)  # [B, T-1]
        if not bool(starts.any()):  # one text per row; padding after it needs no mask, nothing sees it
            return None
        return (_across(segment_ids, segment_ids, torch.eq) & _across(slots, slots, torch.ge))[:, None]
    inside = forks >= 0  # of a branch
    last = torch.where(inside, forks, slots)  # the last slot of its text that a token sees
    text = _across(segment_ids.gather(1, last), segment_ids, torch.eq) & _across(last, slots, torch.ge)
    branch = _across(forks, forks, torch.eq) & _across(slots, slots, torch.ge)
    return torch.where(inside[:, None, :], branch & inside[:, :, None], text)[:, None]


def _across(queries: Tensor, keys: Tensor, compare) -> Tensor:
    """[B, T] each -> bool [B, T, T], queries down."""
    return compare(queries[:, :, None], keys[:, None, :])
