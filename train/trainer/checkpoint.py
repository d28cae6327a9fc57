"""Checkpoints of a run: written whole or not at all, and refused if another recipe made them.

A checkpoint is a folder `step-00000100` with the drafter's float32 weights (safetensors), the
optimizer's state by the names of parameters, and `state.json`; nothing in it depends on the number
of processes. A kill between two writes leaves the one before. The newest two are kept, with a
checksum of every file: a run goes on from the newest that is whole."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from draftsmith.speculators.errors import CheckpointError
from draftsmith.speculators.export import fresh_folder
from draftsmith.train.data.packing import PackedRow
from draftsmith.train.recipe.recipe import Recipe
from draftsmith.train.trainer.optimizers import load_optimizer_state
from draftsmith.train.trainer.parallel import Replica


@dataclass
class TrainState:
    """The state of a run apart from its tensors. `history`: the records of all steps."""

    step: int = 0
    seconds: float = 0.0  # spent training, over every resumption
    begun: float = 0.0  # the share of the budget that was spent before the first step
    best_value: float | None = None  # held-out expected acceptance length of `best/`
    best_step: int = 0
    measure: str = ""  # a hash of what `best_value` was measured on, and how
    tenths: int = 0  # of the budget, at the newest evaluation or checkpoint
    skipped: int = 0  # steps whose gradients were not finite
    skipped_in_a_row: int = 0  # the newest of them
    rows_per_step: int = 0  # over all processes; 0 in checkpoints that do not say
    history: list[dict[str, Any]] = field(default_factory=list)
    fingerprint: str = ""  # of the recipe's sections that shape training, the target and the rows
    recipe_fingerprint: str = ""  # of these sections alone; empty in checkpoints of 1.0


HISTORY = "history.jsonl"
CHECKSUMS = "checksums.json"
BEST = "best"  # folder of the weights of the best held-out evaluation
KEPT = 2  # checkpoints: should the newest be damaged, the one before is there


def step_folder(root: Path, step: int) -> Path:
    """The folder of the checkpoint after `step`, below the folder of a stage's checkpoints."""
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
    """Writes the checkpoint of `state.step` and keeps KEPT of all. `optimizer`: its
    `optimizer_state`; `adapter`: the LoRA of the target. OSError: the disk cannot take it, and
    those before it stay."""
    folder = step_folder(root, state.step)
    _remove(root, ".step-*")
    with fresh_folder(folder) as fresh:
        _save_weights(fresh, drafter, adapter)
        with (fresh / "optimizer.pt").open("wb") as file:
            torch.save(dict(optimizer), file)
        tree = dict(vars(state))
        records = [json.dumps(record, allow_nan=False) + "\n" for record in tree.pop("history")]
        (fresh / HISTORY).write_text("".join(records))
        (fresh / "state.json").write_text(json.dumps(tree, allow_nan=False))
        checksums = {path.name: _checksum(path, flush=True) for path in sorted(fresh.iterdir())}
        (fresh / CHECKSUMS).write_text(json.dumps(checksums))
    for old in sorted(root.glob("step-*"))[:-KEPT]:
        shutil.rmtree(old, ignore_errors=True)
    return folder


def _checksum(path: Path, flush: bool = False) -> str:
    """blake2b (hex) of a file. `flush`: its contents are on the disk by then."""
    with path.open("rb") as file:
        if flush:
            os.fsync(file.fileno())
        return hashlib.file_digest(file, "blake2b").hexdigest()


def damage(folder: Path) -> str:
    """What is wrong with the files of a checkpoint; empty: nothing."""
    try:
        read_state(folder)
        checksums = json.loads((folder / CHECKSUMS).read_text())
        for name, expected in checksums.items():
            if _checksum(folder / name) != expected:
                return f"{name} is not as it was written"
    except CheckpointError:
        return "state.json or history.jsonl cannot be read"
    except (OSError, ValueError) as error:
        return f"a file cannot be read ({error})"
    return ""


def set_aside_damaged(root: Path, say: Callable[[str], None]) -> None:
    """Renames damaged checkpoints that are newer than a whole one, and says so. CheckpointError:
    there are checkpoints, and none is whole."""
    damaged: list[tuple[Path, str]] = []
    for folder in sorted(root.glob("step-*"), reverse=True):
        reason = damage(folder)
        if not reason:
            break
        damaged.append((folder, reason))
    else:
        if damaged:
            folder, reason = damaged[0]
            raise CheckpointError(
                f"{reason}, and no checkpoint before it is whole; delete {root} to start again",
                where=f"{folder}",
            )
    for path, reason in damaged:
        aside = path.with_name(f"damaged-{path.name}")
        shutil.rmtree(aside, ignore_errors=True)
        path.rename(aside)
        say(f"{path}: {reason}; it is now {aside.name}, and the run goes on from {folder.name}")


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
        raise _of_another(folder)
    return state


def require_recipe(root: Path, recipe: Recipe) -> None:
    """CheckpointError if the newest checkpoint in `root` was made by another recipe, which is known
    before there are rows, and before texts are written for it."""
    newest = latest(root)
    if newest is None:
        return
    try:
        made_by = read_state(newest).recipe_fingerprint
    except CheckpointError:  # a damaged one is set aside later
        return
    if made_by and made_by != recipe_fingerprint(recipe):
        raise _of_another(newest)


def _of_another(folder: Path) -> CheckpointError:
    return CheckpointError(
        "was made by another recipe or from other data; give the new one another `name` or"
        f" `output_dir`, or delete {folder.parent} to start again",
        where=f"{folder}",
    )


def read_tensors(folder: Path, with_adapter: bool = False) -> dict[str, Any]:
    """The tensors of a checkpoint, by the file that they are in."""
    saved = read_weights(folder, with_adapter)
    path = folder / "optimizer.pt"
    return saved | {"optimizer": torch.load(path, map_location="cpu", weights_only=True)}


def load_tensors(
    saved: Mapping[str, Any],
    replica: Replica,
    optimizers: Sequence[torch.optim.Optimizer],
    modules: nn.Module,
    adapter: nn.Module | None = None,
) -> None:
    """Restores weights and optimizers on any number of processes, which all have `saved`."""
    replica.load(saved["drafter"])
    if adapter is not None:
        adapter.load_state_dict(saved["adapter"], strict=True)
    load_optimizer_state(modules, optimizers, saved["optimizer"])


def save_best(root: Path, drafter: nn.Module, adapter: nn.Module | None = None) -> None:
    """Keeps the weights of the best held-out evaluation in BEST. OSError: the disk cannot take
    them, and those before them stay."""
    _remove(root, f".{BEST}-*")
    with fresh_folder(root / BEST) as fresh:
        _save_weights(fresh, drafter, adapter)


def read_weights(folder: Path, with_adapter: bool = False) -> dict[str, dict[str, torch.Tensor]]:
    """The weights in a checkpoint or in BEST: of the `drafter`, and of the `adapter`."""
    names = ("drafter", "adapter") if with_adapter else ("drafter",)
    return {name: load_file(folder / f"{name}.safetensors") for name in names}


def load_weights(
    saved: Mapping[str, dict[str, torch.Tensor]],
    drafter: nn.Module,
    adapter: nn.Module | None = None,
) -> None:
    """Fills `drafter`, and `adapter` if there is one, with the result of `read_weights`."""
    drafter.load_state_dict(saved["drafter"], strict=True)
    if adapter is not None:
        adapter.load_state_dict(saved["adapter"], strict=True)


def _remove(root: Path, pattern: str) -> None:
    """Removes what a killed run has left half-written."""
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
        "training": {"activation_checkpointing", "keep_features_on", "save_minutes"},
        "target": {"sharding"},
        # a limit, and who tokenises; `data_hash` is of the rows that are left
        "data": {"max_bad_row_share", "num_proc"},
    }
    parts = [recipe.model_dump(mode="json", exclude=left_out), target_hash, before, data_hash]
    if recipe.on_policy is not None:
        parts.append(recipe.evaluation.num_speculative_tokens)
    if recipe.features.mode == "cache":
        parts += [recipe.features.engine, recipe.features.encoding]
    elif recipe.features.engine == "vllm" and recipe.features.endpoints:
        parts.append(recipe.features.engine)
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def recipe_fingerprint(recipe: Recipe) -> str:
    """The part of the `fingerprint` of a stage that its recipe alone gives."""
    return fingerprint(recipe, "", "", "")


def new_state(recipe: Recipe, fingerprint: str, rows_per_step: int) -> TrainState:
    """The state of a training that begins."""
    return TrainState(
        fingerprint=fingerprint,
        recipe_fingerprint=recipe_fingerprint(recipe),
        rows_per_step=rows_per_step,
    )


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
