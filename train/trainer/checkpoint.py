"""Checkpoints of a run: written whole or not at all, and refused if another recipe made them.

A checkpoint is a folder `step-00000100` with the drafter's float32 weights (safetensors), the
optimizer's state by the names of parameters, and `state.json`; nothing in it depends on the number
of processes. A kill between two writes leaves the one before."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from draftsmith.speculators.errors import CheckpointError
from draftsmith.speculators.export import replace_folder
from draftsmith.train.data.packing import PackedRow
from draftsmith.train.recipe.recipe import Recipe
from draftsmith.train.trainer.optimizers import load_optimizer_state
from draftsmith.train.trainer.parallel import Replicated


@dataclass
class TrainState:
    """The state of a run apart from its tensors. `history`: the records of all steps."""

    step: int = 0
    seconds: float = 0.0  # spent training, over every resumption
    best_value: float | None = None  # held-out expected acceptance length of `best/`
    best_step: int = 0
    tenths: int = 0  # of the budget, at the newest evaluation or checkpoint
    skipped: int = 0  # steps whose gradients were not finite
    skipped_in_a_row: int = 0  # the newest of them
    history: list[dict[str, Any]] = field(default_factory=list)
    fingerprint: str = ""  # of the recipe's sections that shape training


HISTORY = "history.jsonl"


def step_folder(root: Path, step: int) -> Path:
    return root / f"step-{step:08d}"


def latest(root: Path) -> Path | None:
    """The newest complete checkpoint, or None."""
    complete = (path for path in root.glob("step-*") if (path / "state.json").exists())
    return max(complete, default=None)


def save(
    root: Path,
    drafter: nn.Module,
    optimizer: Mapping[str, Any],
    state: TrainState,
    adapter: nn.Module | None = None,
) -> Path:
    """Writes the checkpoint of `state.step` and removes those before it. `optimizer`: its
    `optimizer_state`; `adapter`: the LoRA of the target."""
    root.mkdir(parents=True, exist_ok=True)
    folder, fresh = step_folder(root, state.step), root / f".step-{state.step}-{os.getpid()}"
    fresh.mkdir(exist_ok=True)
    _save_weights(fresh, drafter, adapter)
    torch.save(dict(optimizer), fresh / "optimizer.pt")
    tree = dict(vars(state))
    records = [json.dumps(record, allow_nan=False) + "\n" for record in tree.pop("history")]
    (fresh / HISTORY).write_text("".join(records))
    (fresh / "state.json").write_text(json.dumps(tree, allow_nan=False))
    replace_folder(fresh, folder)
    for old in sorted(root.glob("step-*"))[:-1]:
        shutil.rmtree(old, ignore_errors=True)
    _remove(root, ".step-*")
    return folder


def read_state(folder: Path) -> TrainState:
    """The state of a checkpoint, whichever recipe made it."""
    try:
        tree = json.loads((folder / "state.json").read_text())
        records = (folder / HISTORY).read_text().splitlines()
        return TrainState(**tree, history=[json.loads(record) for record in records])
    except (OSError, json.JSONDecodeError, TypeError) as error:
        raise CheckpointError(
            f"unreadable ({error}); delete the folder to start again", where=f"{folder}"
        ) from error


def load(folder: Path, fingerprint: str) -> TrainState:
    """The state of the run. CheckpointError if the recipe or its data have changed since."""
    state = read_state(folder)
    if state.fingerprint != fingerprint:
        raise CheckpointError(
            "was made by another recipe or from other data; give the new one another `name` or"
            " `output_dir`, or delete the folder to start again",
            where=f"{folder}",
        )
    return state


def load_tensors(
    folder: Path,
    replica: Replicated,
    optimizers: Sequence[torch.optim.Optimizer],
    modules: nn.Module,
    adapter: nn.Module | None = None,
) -> None:
    """Restores weights and optimizers on any number of processes."""
    replica.load(load_file(folder / "drafter.safetensors"))
    if adapter is not None:
        adapter.load_state_dict(load_file(folder / "adapter.safetensors"), strict=True)
    saved = torch.load(folder / "optimizer.pt", map_location="cpu", weights_only=True)
    load_optimizer_state(modules, optimizers, saved)


def save_best(root: Path, drafter: nn.Module, adapter: nn.Module | None = None) -> None:
    """Keeps the weights of the best held-out evaluation in `best/`."""
    fresh = root / f".best-{os.getpid()}"
    _remove(root, ".best-*")
    fresh.mkdir(parents=True, exist_ok=True)
    _save_weights(fresh, drafter, adapter)
    replace_folder(fresh, root / "best")


def load_best(root: Path, drafter: nn.Module, adapter: nn.Module | None = None) -> None:
    """Fills `drafter`, and `adapter` if there is one, with the weights of `best/`."""
    path = root / "best" / "drafter.safetensors"
    drafter.load_state_dict(load_file(path), strict=True)
    if adapter is not None:
        adapter.load_state_dict(load_file(path.with_stem("adapter")), strict=True)


def _remove(root: Path, pattern: str) -> None:
    """Removes what killed runs left half-written."""
    for torn in root.glob(pattern):
        shutil.rmtree(torn, ignore_errors=True)


def _save_weights(folder: Path, drafter: nn.Module, adapter: nn.Module | None) -> None:
    """CheckpointError names a tensor that is not finite; nothing is written then."""
    for name, module in (("drafter", drafter), ("adapter", adapter)):
        if module is None:
            continue
        state = {
            key: tensor.detach().cpu().contiguous().clone()
            for key, tensor in module.state_dict().items()
        }
        for key, tensor in state.items():
            if tensor.is_floating_point() and not tensor.isfinite().all():
                raise CheckpointError(
                    f"{name} tensor {key} has values that are not finite; it is not saved, and the"
                    " checkpoint before it stays",
                    where=f"{folder.parent}",
                )
        save_file(state, folder / f"{name}.safetensors")


# Sections of a recipe that shape no training: names, places, reports, and what comes after it.
# Every other section is in the fingerprint; each stage is a recipe with a fingerprint of its own.
NOT_IN_FINGERPRINT = {"name", "output_dir", "features", "stages"}
NOT_IN_FINGERPRINT |= {"export", "evaluation", "gates", "trackers"}


def fingerprint(recipe: Recipe, target_hash: str, before: str, data_hash: str) -> str:
    """The hash of everything that shapes a stage's training: the recipe without NOT_IN_FINGERPRINT,
    the target, the stage before, and the rows themselves (`hash_rows`).

    A checkpoint continues only a training of the same fingerprint."""
    left_out = {
        **dict.fromkeys(NOT_IN_FINGERPRINT, True),
        "regenerate": {"endpoints"},  # who writes, not what
        # how numbers are computed or shown, not what they are
        "training": {"activation_checkpointing"},
        "target": {"sharding"},
        "data": {"max_bad_row_share"},  # a limit; `data_hash` is of the rows that are left
    }
    parts = [recipe.model_dump(mode="json", exclude=left_out), target_hash, before, data_hash]
    if recipe.on_policy is not None:
        parts.append(recipe.evaluation.num_speculative_tokens)
    if recipe.features.mode == "cache":
        parts += [recipe.features.engine, recipe.features.encoding]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def hash_rows(rows: Iterable[PackedRow], prompts: Iterable[Sequence[int]] = ()) -> str:
    """The hash of what is trained on: packed rows, and the prompts of on-policy texts."""
    digest = hashlib.blake2b()
    for row in rows:
        for array in (row.input_ids, row.segment_ids, row.loss_mask):
            digest.update(len(array).to_bytes(8, "little"))
            digest.update(np.ascontiguousarray(array).data)
    for prompt in prompts:
        digest.update(json.dumps(list(prompt)).encode())
    return digest.hexdigest()
