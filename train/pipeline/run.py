"""One run from a recipe to a measured drafter: data -> regenerate -> train -> export -> acceptance.

Every stage leaves its result below the run's folder and is skipped when it is there already, so
that running the same command again continues."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed

from draftsmith.inference.progress import Stages
from draftsmith.speculators.export.upload import account
from draftsmith.speculators.precision import autocast_dtype, free_memory, own_device
from draftsmith.train.pipeline import trackers
from draftsmith.train.pipeline.acceptance_stage import accept, check_prompts, engines_of
from draftsmith.train.pipeline.adapted_target import with_adapted_target
from draftsmith.train.pipeline.export_stage import export, is_refreshed
from draftsmith.train.pipeline.run_folder import check_folders, claimed
from draftsmith.train.pipeline.train_stage import train
from draftsmith.train.pipeline.vocabulary_stage import with_draft_vocabulary
from draftsmith.train.planner.plan import short_budgets
from draftsmith.train.processes import RunAccelerator, is_shared, on_first
from draftsmith.train.recipe.load import load_recipe
from draftsmith.train.recipe.recipe import Recipe
from draftsmith.train.trainer import checkpoint
from draftsmith.train.trainer.parallel import check_launch


def run(path: str | Path, overrides: Sequence[str] = (), *, dry_run: bool = False) -> int:
    """Runs a recipe; 0, or 1 if a gate is missed. DraftsmithError for what the user can mend."""
    recipe = load_recipe(path, overrides)
    if dry_run:
        from draftsmith.train.planner.describe import describe
        from draftsmith.train.planner.devices import this_machine
        from draftsmith.train.planner.plan import make_plan

        print(recipe.resolved_yaml())
        describe(make_plan(recipe, this_machine()))
        return 0
    if recipe.export.push_to_hub:
        account()  # a token that is of no use is noticed now, and not after the training
    engines_of(recipe)  # and so is a vLLM that a gate needs
    accelerator = make_accelerator(recipe)
    on_first(accelerator, lambda: check_folders(recipe))
    on_first(accelerator, lambda: check_prompts(recipe))  # suites among them
    with claimed(accelerator, Path(recipe.output_dir)):
        return run_claimed(recipe, accelerator)


def run_claimed(recipe: Recipe, accelerator: Accelerator) -> int:
    """`run` in a folder that belongs to it."""
    stages = Stages(enabled=accelerator.is_main_process)
    for line in optimizers_of(recipe):
        stages.say(line)
    for warning in short_budgets(recipe, accelerator.num_processes) if stages.enabled else ():
        stages.say(warning)
    trackers.start(recipe, accelerator)
    set_seed(recipe.training.seed)
    recipe = with_draft_vocabulary(recipe, accelerator, stages)
    recipe_text = recipe.resolved_yaml()
    trackers.log_recipe(recipe, accelerator)
    if not is_shared(accelerator, Path(recipe.output_dir)):
        stages.say("      the first process alone keeps the run, as others do not see its folder")
    recipe = with_adapted_target(recipe, accelerator)
    before = _newest_checkpoint(recipe)
    trained = train(recipe, accelerator, stages, recipe_text)
    accelerator.wait_for_everyone()
    code = 0
    if accelerator.is_main_process:
        if is_refreshed(recipe) and before == _newest_checkpoint(recipe):
            stages.say(
                "export: that of a refresh stays; draftsmith refresh --undo brings back the head of"
                " this training"
            )
        else:
            with stages.stage("export"):
                export(recipe, trained)
        steps = trained.state.step
        del trained  # what is measured is loaded from the export, and needs the memory
        free_memory()
        code = accept(recipe, stages=stages)
        trackers.log_report(recipe, accelerator, steps)
        if recipe.export.push_to_hub:
            from draftsmith.train.pipeline.publish import push_run

            push_run(recipe, code, stages.say)
    accelerator.end_training()
    return code


def _newest_checkpoint(recipe: Recipe) -> Path | None:
    """Of the last stage."""
    last, _ = recipe.training_stages()[-1]
    return checkpoint.latest(recipe.checkpoints(last))


def optimizers_of(recipe: Recipe) -> list[str]:
    """The optimizer of each stage of the training, its rates and their preset. A stage whose preset
    follows from rows that are not counted yet says so when it begins."""
    lines = []
    for name, part in recipe.training_stages():
        training = part.training
        if training.preset != "auto":
            described = part.training_for(training.steps).describe()
            lines.append(f"{name}: {described}" if name else described)
    return lines


def make_accelerator(recipe: Recipe) -> Accelerator:
    """Precision and trackers of the recipe. ConfigError names a tracker that is not installed, or a
    way of sharding that is not supported."""
    check_launch()
    trackers.require(recipe)
    device = own_device()
    autocast = autocast_dtype(recipe.training.mixed_precision, device)
    accelerator = RunAccelerator(
        cpu=device.type == "cpu",  # said aloud, since processes on CPUs find each other only then
        mixed_precision="bf16" if autocast == torch.bfloat16 else "no",
        log_with=list(recipe.trackers) or None,
        project_dir=recipe.output_dir,
    )
    # With FSDP accelerate's default is that transformers fills a model's weights in the first
    # process only and leaves the others' as memory happens to be; here every process reads its own.
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
    return accelerator
