"""Rollouts -> packed rows: the text, and after it what the drafter proposed where verification
rejected it.

A round of drafts d_0 .. d_{m-1} began at anchor a, the last token then committed; slot t = a - 1 of
a head drafted it. If n < m of them were kept, depth k of that slot read the text at a + k for k <=
n, and for k > n the draft d_{k-1}, which the text does not hold. The drafts that some depth reads
follow the text as a branch that leaves it after slot a + n, and the slot's path leads into it. All
other slots have their ordinary paths.

The depths that read d_n, d_{n+1}, .. are a rejected suffix: they match the target's states after
tokens that the text does not hold, states that the drafter comes into whenever it errs. Their terms
have a loss and a normaliser of their own (Draft-OPD, arXiv 2605.29343): `branch_weights`,
`count_suffix`, `split`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from speculators.drafter import DraftStep, term_paths
from speculators.precision import on_host, to_device
from train.data.loss_mask import TokenRow
from train.data.packing import PackedRow, pack
from train.on_policy.rollout import Rollout

WORKLOAD = "rollout"


def rollout_rows(
    rollouts: Sequence[Rollout],
    *,
    depths: int,
    max_length: int,
    packing: bool = True,
    branches: bool = True,
) -> list[PackedRow]:
    """Rows of at most `max_length` tokens. `depths`: the number trained; `branches`: with the
    rejected drafts."""
    rows = [
        (
            branching_row(rollout, depths, max_length)
            if branches
            else TokenRow.from_response(rollout.prompt_ids, rollout.output_ids, WORKLOAD)
        )
        for rollout in rollouts
    ]
    return pack(rows, max_length, packing=packing)


def branching_row(rollout: Rollout, depths: int, max_length: int) -> PackedRow:
    """One text and its branches, without those that would make the row longer than `max_length`.

    A round that the end of the text cut off has no branch, and neither has one whose rejected draft
    no depth reads."""
    ids = [*rollout.prompt_ids, *rollout.output_ids]
    N, positions = len(ids), list(range(len(ids)))
    mask = np.arange(N) >= len(rollout.prompt_ids)
    paths, forks = _ordinary_paths(mask, depths), [-1] * N
    for verified in rollout.rounds:
        n = verified.accepted
        branch = verified.drafts[:depths][n:-1]  # d_n onwards; nobody reads the last draft
        if not branch or verified.length + n + 1 > N or len(ids) + len(branch) > max_length:
            continue
        fork, slot = verified.length - 1 + n, verified.length - 2
        paths[slot, n + 1 :] = -1
        paths[slot, n + 1 : n + 1 + len(branch)] = len(ids) + np.arange(len(branch))
        ids += branch
        forks += [fork] * len(branch)
        positions += range(fork + 1, fork + 1 + len(branch))
    more = len(ids) - N
    return PackedRow(
        input_ids=np.array(ids, np.int32),
        position_ids=np.array(positions, np.int32),
        segment_ids=np.array([0] * N + [-1] * more, np.int32),
        loss_mask=np.concatenate([mask, np.zeros(more, bool)]),
        workloads=(WORKLOAD,),
        paths=np.concatenate([paths, np.full((more, depths), -1, np.int32)]),
        forks=np.array(forks, np.int32),
    )


def _ordinary_paths(loss_mask: np.ndarray, depths: int) -> np.ndarray:
    """int32 [N, K] of one text, as if it had no branches."""
    text = SimpleNamespace(
        loss_mask=torch.from_numpy(loss_mask)[None],
        segment_ids=torch.zeros(1, len(loss_mask), dtype=torch.long),
    )
    paths = [torch.where(*term_paths(text, depth), -1) for depth in range(depths)]
    return torch.stack(paths, -1)[0].int().numpy()


def branch_weights(batch: Any, decay: float) -> Tensor | None:
    """[B, T]: decay**j of the j-th token of a branch, counted from 0, and 0 of every other token;
    None for rows without branches."""
    forks = getattr(batch, "forks", None)
    if forks is None:
        return None
    place = batch.position_ids - batch.position_ids.gather(1, forks.clamp(min=0)) - 1
    return torch.where(forks >= 0, decay ** place.clamp(min=0), 0.0)


def count_suffix(batch: Any, depths: int, decay: float) -> Tensor:
    """[K + 1]: terms in suffixes of each depth of a batch, and Σ decay**j over all of them; before
    any unroll."""
    weights, counts = (
        branch_weights(batch, decay),
        torch.zeros(depths + 1, device=batch.segment_ids.device),
    )
    if weights is None:
        return counts
    for depth in range(depths):
        valid, path = term_paths(batch, depth)
        terms = weights.gather(1, path)[valid]
        counts[depth] = (terms > 0).sum()
        counts[depths] += terms.sum()
    return counts


def split(
    steps: Sequence[DraftStep], weights: Tensor | None
) -> tuple[list[DraftStep], list[DraftStep]]:
    """Splits the terms of each depth into the main ones and those in suffixes, which get the
    `weights` [B, T] of their targets, in the host's memory."""
    if weights is None:
        return list(steps), []
    main, rejected = [], []
    for step in steps:
        decayed = weights.flatten()[on_host(step.target_index)]  # [N], in the host's memory
        inside = decayed > 0
        main.append(_of(step, ~inside))
        if bool(inside.any()):
            rejected.append(
                replace(_of(step, inside), weight=to_device(decayed[inside], step.weight.device))
            )
    return main, rejected


def _of(step: DraftStep, chosen: Tensor) -> DraftStep:
    """The chosen terms of a depth. chosen bool [N], in the host's memory."""
    device, index = step.weight.device, chosen.nonzero().flatten()
    slots = {name: on_host(getattr(step, name))[index] for name in ("target_index", "anchor_index")}
    own = to_device(index, device)
    known = {name: to_device(places, device) for name, places in slots.items()}
    return replace(step, **known, hidden=step.hidden[own], weight=step.weight[own])
