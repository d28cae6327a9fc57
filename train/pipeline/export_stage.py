"""Exports a run: its drafter in every format of the recipe, and a target that was trained.

The first format is `<output_dir>/export`, the folder that is measured; any other is a folder of its
own beside it, `export-<format>`. Not below it: an upload or a loader that takes every *.safetensors
of a folder would find several drafters there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import torch

from draftsmith.speculators.digests import model_weights_sha256
from draftsmith.speculators.drafter import Drafter
from draftsmith.speculators.errors import CheckpointError, ConfigError
from draftsmith.speculators.export import (
    WEIGHTS_HASH,
    check_replaceable,
    describe_target,
    export_drafter,
    read_fields,
)
from draftsmith.speculators.precision import as_dtype
from draftsmith.speculators.registry import family_class
from draftsmith.speculators.target.info import TargetSketch
from draftsmith.speculators.target.longrope import trained_length
from draftsmith.speculators.target.target_head import TargetHead
from draftsmith.speculators.vocab.token_counts import load_counts
from draftsmith.train.data.prepare import run_tokenizer
from draftsmith.train.pipeline.adapted_target import named_adapted_target
from draftsmith.train.pipeline.drafter_stage import meet_tokenizers
from draftsmith.train.recipe.drafter_config import drafter_config
from draftsmith.train.recipe.load import load_recipe, override_text
from draftsmith.train.recipe.recipe import EXPORT, RECIPE, TARGET, Recipe
from draftsmith.train.regeneration.store import Response, summary
from draftsmith.train.trainer import checkpoint
from draftsmith.train.trainer.joint_target import JointTarget


@dataclass
class Trained:
    """The result of a training: the drafter (and the adapter of the target) with the weights of the
    last stage's best held-out evaluation, its last ones without; the state; held-out texts."""

    drafter: Drafter
    state: checkpoint.TrainState
    tokenizer: Any
    held_out: dict[float, list[Response]]
    joint: JointTarget | None = None


def export(
    recipe: Recipe, trained: Trained, facts: Mapping[str, Any] = MappingProxyType({})
) -> Path:
    """Writes every format in the target checkpoint's dtype unless the recipe names one, and the
    target if it was trained jointly; returns the folder of the first format. `facts`: of the
    training, for its provenance in config.json."""
    drafter = trained.drafter
    state = trained.state
    out = Path(recipe.output_dir)
    dtype = _dtype(recipe.export.dtype, drafter.target)
    step = state.best_step or state.step
    provenance = _provenance(recipe, step, trained.tokenizer, out, drafter.target.config)
    provenance |= facts
    if trained.joint is not None:
        written = list(chain.from_iterable(trained.held_out.values()))
        texts = [(response.prompt_ids, response.output_ids) for response in written]
        before, after = trained.joint.held_out_loss(texts)
        change = {"before": before, "after": after, "responses": len(texts)}
        trained.joint.export(out / TARGET, trained.tokenizer, change)
        name = str(out / TARGET)
        target = {"name_or_path": name, WEIGHTS_HASH: model_weights_sha256(name)}
    else:
        weights = model_weights_sha256(recipe.target.model, recipe.target.revision)
        target = {WEIGHTS_HASH: weights}
    provenance["target"] = describe_target(drafter.target) | target
    for i, name in enumerate(recipe.export.formats):
        folder = out / (f"{EXPORT}-{name}" if i else EXPORT)
        export_drafter(drafter, folder, dtype=dtype, provenance=provenance, format=name)
    return out / EXPORT


def refreshed_name(recipe: Recipe) -> str:
    """What the recipe of a refresh of this one's run is called."""
    return f"{recipe.name}/refresh"


def is_refreshed(recipe: Recipe) -> bool:
    """Whether the run's export is the head of a refresh, and not that of its checkpoints."""
    folder = Path(recipe.output_dir) / EXPORT
    if not (folder / "config.json").is_file():
        return False
    described = read_fields(folder).get("draftsmith") or {}
    return described.get("recipe") == refreshed_name(recipe)


def recipe_of(run_dir: Path, model: str = "") -> Recipe:
    """The recipe of a run, whose folder may have been moved. `model`: the folder or id of its
    target now, in place of the recipe's.

    CheckpointError: there is no run. ConfigError: `model` for a target that the run has written."""
    if not (run_dir / RECIPE).is_file():
        raise CheckpointError(
            f"neither a run's folder, which has {RECIPE}, nor a drafter's, which has config.json;"
            " give one of them",
            where=f"{run_dir}",
        )
    overrides = []
    if model:
        named = {"target.model": model, "target.revision": None}
        overrides = [override_text(key, value) for key, value in named.items()]
    recipe = load_recipe(run_dir / RECIPE, overrides)
    if model and recipe.target.adapter is not None:
        raise ConfigError(
            f"the target is {run_dir / TARGET}, with the run's adapter; leave the option out",
            where=f"--model {model}",
        )
    return named_adapted_target(recipe.model_copy(update={"output_dir": str(run_dir)}))


def reexport(
    run_dir: Path, out: Path, *, dtype: str = "auto", format: str = "vllm", model: str = ""
) -> tuple[Path, int]:
    """Writes the run's best weights (the newest without held-out evaluation) to `out`; returns it
    and their step. Of the target only config.json and the tokenizer are read. `model`: as of
    `recipe_of`, whose errors come too. ConfigError for an `out` whose contents may not go."""
    check_replaceable(out, run_dir)
    recipe = recipe_of(run_dir, model)
    if is_refreshed(recipe):
        raise ConfigError(
            f"{run_dir / EXPORT} is the head of a refresh, which the run's checkpoints do not hold;"
            f" give {run_dir / EXPORT} in place of {run_dir}, or undo the refresh first",
            where="export",
        )
    root = recipe.checkpoints()
    newest = checkpoint.latest(root)
    if newest is None:
        raise CheckpointError("no complete checkpoint; run the recipe first", where=f"{root}")
    target = recipe.target.sketch()
    config = drafter_config(recipe, target)
    drafter = family_class(config.family)(config).prepare_training(recipe.drafter)
    state = checkpoint.read_state(newest)
    has_best = state.best_value is not None
    step = state.best_step if has_best else state.step
    weights = checkpoint.read_weights(root / checkpoint.BEST if has_best else newest)
    checkpoint.load_weights(weights, drafter)
    exported = _dtype(dtype if dtype != "auto" else recipe.export.dtype, target)
    tokenizer = recipe.target.load_tokenizer()
    drafter.attach(cast(TargetHead, target))  # sizes are all that is asked of it
    meet_tokenizers(recipe, drafter, tokenizer)
    drafter.token_counts = load_counts(run_dir / EXPORT)
    provenance = _provenance(recipe, step, tokenizer, run_dir, target.config)
    trained = {"name_or_path": str(run_dir / TARGET)} if recipe.joint else {}
    provenance["target"] = describe_target(target) | trained | _weights_then(run_dir)
    return export_drafter(drafter, out, dtype=exported, provenance=provenance, format=format), step


def _weights_then(run_dir: Path) -> dict[str, str]:
    """The hash of the target's weights at the end of the run, by its own export; the target may
    have changed since."""
    if not (run_dir / EXPORT).is_dir():
        return {}
    target = (read_fields(run_dir / EXPORT).get("draftsmith") or {}).get("target") or {}
    return {name: value for name, value in target.items() if name == WEIGHTS_HASH}


def _dtype(requested: str, target: TargetHead | TargetSketch) -> torch.dtype:
    return target.checkpoint_dtype if requested == "auto" else as_dtype(requested)


def _provenance(
    recipe: Recipe, step: int, tokenizer: Any, run_dir: Path, target_config: Any
) -> dict[str, Any]:
    """The run, the number of tokens per round that it is measured with, whose text it was trained
    on, and of LongRoPE the length whose frequencies it was trained with."""
    length = trained_length(target_config, recipe.data.max_length)
    return {
        "recipe": recipe.name,
        "recipe_hash": recipe.recipe_hash(),
        "step": step,
        "num_speculative_tokens": recipe.evaluation.num_speculative_tokens,
        **({} if length is None else {"longrope_length": length}),
        **run_tokenizer(recipe, tokenizer).template_facts(),
        **summary(run_dir),
    }
