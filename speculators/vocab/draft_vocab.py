"""Reduced draft vocabularies: the target tokens that a head can propose, and the maps between their
ids.

A head's softmax runs over V_draft tokens; verification needs q over the target's V. Ids are
ascending."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftsmith.speculators.errors import CheckpointError

# in a folder of its own, for drafters whose weights are another tool's model
FILE = "draft_vocab/model.safetensors"


def choose_draft_vocabulary(counts: Tensor, size: int, required: Sequence[int] = ()) -> Tensor:
    """counts [V] -> [size] target ids of the most frequent, ascending; lower ids win ties, and
    `required` come first."""
    counts = counts.clone()
    counts[list(required)] = counts.max() + 1
    order = torch.argsort(counts, descending=True, stable=True)[:size]
    return torch.sort(order).values


def coverage(counts: Tensor, draft_to_target: Tensor) -> float:
    """The fraction of the counted tokens that is in the draft vocabulary."""
    return float(counts[draft_to_target].sum() / counts.sum().clamp(min=1))


def scatter_to_target(q: Tensor, draft_to_target: Tensor | None, vocab_size: int) -> Tensor:
    """q [..., V_draft] -> [..., V]: zero for tokens the head cannot propose."""
    if draft_to_target is None:
        return q
    full = q.new_zeros(*q.shape[:-1], vocab_size)
    full[..., draft_to_target] = q
    return full


def to_target_ids(draft_ids: Tensor, draft_to_target: Tensor | None) -> Tensor:
    """Draft ids -> target ids, any shape."""
    return draft_ids if draft_to_target is None else draft_to_target.take(draft_ids)


def to_draft_ids(target_ids: Tensor, draft_to_target: Tensor | None) -> Tensor:
    """Target ids [N] -> draft ids [N], -1 for tokens the head cannot propose."""
    if draft_to_target is None or target_ids.numel() == 0:
        return target_ids
    ordered, order = draft_to_target.sort()
    place = torch.searchsorted(ordered, target_ids).clamp(max=len(ordered) - 1)
    return torch.where(ordered[place] == target_ids, order[place], -1)


def to_offsets(draft_to_target: Tensor) -> Tensor:
    """The `d2t` tensor of EAGLE-3 checkpoints: target id = draft id + d2t[draft id]."""
    return draft_to_target - torch.arange(len(draft_to_target), device=draft_to_target.device)


def from_offsets(d2t: Tensor, vocab_size: int, where: str) -> Tensor:
    """The inverse of `to_offsets`. CheckpointError if the ids leave the vocabulary or repeat (plain
    ids would)."""
    ids = d2t.long() + torch.arange(len(d2t))
    if ids.min() < 0 or ids.max() >= vocab_size or len(ids.unique()) != len(ids):
        raise CheckpointError(
            f"d2t does not hold offsets (target id = draft id + d2t[draft id]): ids run"
            f" from {int(ids.min())} to {int(ids.max())} in a vocabulary of {vocab_size},"
            f" {len(ids) - len(ids.unique())} of them repeated",
            where=where,
        )
    return ids


def save_ids(draft_to_target: Tensor, folder: Path) -> None:
    """Writes ids [V_draft] as `FILE` below `folder`."""
    (folder / FILE).parent.mkdir(exist_ok=True)
    offsets = to_offsets(draft_to_target.cpu())
    save_file({"d2t": offsets}, folder / FILE, metadata={"format": "pt"})


def load_ids(folder: Path, size: int, vocab_size: int) -> Tensor:
    """Reads what `save_ids` wrote [size], ids of a vocabulary. CheckpointError names what is
    wrong."""
    path = folder / FILE
    try:
        offsets = load_file(path).get("d2t")
    except (FileNotFoundError, SafetensorError) as error:
        raise CheckpointError(
            f"{error}; a draft model of a reduced vocabulary needs this file", where=f"{path}"
        ) from error
    if offsets is None or offsets.shape != (size,):
        raise CheckpointError(
            f"expected `d2t`, {size:,} offsets; export the drafter again", where=f"{path}"
        )
    return from_offsets(offsets, vocab_size, f"{path}")
