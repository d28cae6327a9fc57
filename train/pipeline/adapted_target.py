"""The target with an adapter merged, as a folder that every later stage and engine loads."""

from __future__ import annotations

import json
from pathlib import Path

from accelerate import Accelerator

from draftsmith.speculators.digests import weights_sha256
from draftsmith.speculators.errors import CheckpointError, UnsupportedTarget
from draftsmith.speculators.export import fresh_folder, resolve
from draftsmith.speculators.hub import split_revision
from draftsmith.speculators.layers.peft_adapter import merge_saved_adapter
from draftsmith.speculators.target.adapted import CONFIG
from draftsmith.speculators.target.info import auto_class_of
from draftsmith.speculators.target.probe import is_quantised, refuse_incomplete
from draftsmith.train.recipe.recipe import TARGET, Recipe

MERGED = "merged_adapter.json"  # what it was merged from


def with_adapted_target(recipe: Recipe, accelerator: Accelerator | None = None) -> Recipe:
    """The recipe with the folder of the merged target as its target, if it has a `target.adapter`.

    The main process merges, and one of each machine that does not see its folder. The folder is
    kept as long as neither weights nor adapter change. CheckpointError for an adapter that does not
    fit exactly."""
    if recipe.target.adapter is not None and (accelerator is None or accelerator.is_main_process):
        merge_target(recipe, Path(recipe.output_dir) / TARGET)
    if accelerator is not None:
        accelerator.wait_for_everyone()
        if recipe.target.adapter is not None and accelerator.is_local_main_process:
            merge_target(recipe, Path(recipe.output_dir) / TARGET)  # unless it is there
        accelerator.wait_for_everyone()
    return named_adapted_target(recipe)


def named_adapted_target(recipe: Recipe) -> Recipe:
    """The same recipe, without writing the folder."""
    if recipe.target.adapter is None:
        return recipe
    folder = str(Path(recipe.output_dir) / TARGET)
    target = recipe.target.model_copy(update={"model": folder, "revision": None, "adapter": None})
    return recipe.model_copy(update={"target": target})


def merge_target(recipe: Recipe, folder: Path) -> Path:
    """Writes the recipe's target with its adapter merged, in the precision of the checkpoint."""
    t = recipe.target
    base = resolve(t.model, t.revision, what="target")
    adapter = resolve(*split_revision(str(t.adapter)), what="target.adapter")
    if not (adapter / CONFIG).is_file():
        raise CheckpointError(
            f"no {CONFIG}; give what peft's save_pretrained wrote",
            where=f"target.adapter {adapter}",
        )
    source = {
        "target": weights_sha256(base),
        "adapter": weights_sha256(adapter),
        "config": (adapter / CONFIG).read_text(encoding="utf-8"),
    }
    if (folder / MERGED).is_file() and json.loads((folder / MERGED).read_text()) == source:
        return folder
    model, info = auto_class_of(str(base), trust_remote_code=t.trust_remote_code).from_pretrained(
        base,
        dtype="auto",
        trust_remote_code=t.trust_remote_code,
        use_safetensors=True,
        output_loading_info=True,
    )
    refuse_incomplete(info, str(base))
    if is_quantised(model):
        raise UnsupportedTarget(
            f"{base} is quantised; merge into the plain checkpoint, quantise that",
            where="target.adapter",
        )
    model = merge_saved_adapter(model, adapter, "target.adapter")
    with fresh_folder(folder) as fresh:
        model.save_pretrained(fresh)
        t.load_tokenizer().save_pretrained(fresh)
        (fresh / MERGED).write_text(json.dumps(source))
    return folder
