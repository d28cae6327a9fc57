"""The commands that run a recipe or a part of it: `plan`, `regenerate`, `cache-features`, `train`
and `compare`. Torch is imported when one runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from draftsmith.train.commands.options import Gpu, Overrides, Part, RecipeFile, parse_part


def plan(
    recipe: RecipeFile,
    overrides: Overrides = None,
    gpu: Gpu = None,
    count: Annotated[int, typer.Option(min=1, help="Devices on one host, each a process.")] = 1,
    examples: Annotated[
        int | None,
        typer.Option(min=1, help="Conversations of a training source that is not on this machine."),
    ] = None,
) -> None:
    """Estimate time and memory of a recipe. Exit code 1: target and drafter do not fit."""
    from draftsmith.train.planner.describe import describe
    from draftsmith.train.planner.devices import find_device, this_machine
    from draftsmith.train.planner.plan import make_plan
    from draftsmith.train.recipe.load import load_recipe

    device = this_machine() if gpu is None else find_device(gpu)
    estimate = make_plan(load_recipe(recipe, overrides or ()), device, count, examples=examples)
    describe(estimate)
    raise typer.Exit(0 if estimate.fits else 1)


def regenerate(
    recipe: RecipeFile,
    overrides: Overrides = None,
    part: Part = "1/1",
    check_target: Annotated[
        bool,
        typer.Option("--check-target", help="Load the target here, and compare endpoints with it."),
    ] = False,
) -> None:
    """Write a recipe's responses ahead of its training. The recipe's endpoints write them, or else
    the target on this machine. The same command goes on with a run that was stopped."""
    from draftsmith.inference.progress import Stages
    from draftsmith.train.pipeline.adapted_target import with_adapted_target
    from draftsmith.train.pipeline.data_stage import DataStage
    from draftsmith.train.pipeline.run import make_accelerator
    from draftsmith.train.pipeline.run_folder import check_folders
    from draftsmith.train.pipeline.run_target import load_target
    from draftsmith.train.recipe.load import load_recipe

    own_part = parse_part(part)
    checked = load_recipe(recipe, overrides or ())
    check_folders(checked, features=False)
    stages = Stages()
    accelerator = make_accelerator(checked.model_copy(update={"trackers": []}))
    checked = with_adapted_target(checked, accelerator)
    tokenizer = checked.target.load_tokenizer()
    target = None
    for name, stage in checked.training_stages():
        if target is None and (check_target or not stage.regenerate.endpoints):
            target = load_target(checked, accelerator, (), stages)
        data = DataStage(stage, target, tokenizer, accelerator, stages, stage=name, part=own_part)
        if stage.regenerate.enabled:
            data.responses()
        data.held_out()


def cache_features(recipe: RecipeFile, overrides: Overrides = None, part: Part = "1/1") -> None:
    """Write the hidden states of a recipe's training rows. Runs whose features.mode is cache read
    them in place of the target."""
    from draftsmith.inference.progress import Stages
    from draftsmith.train.pipeline.adapted_target import with_adapted_target
    from draftsmith.train.pipeline.data_stage import prepare_data
    from draftsmith.train.pipeline.features_stage import fill, needed_features
    from draftsmith.train.pipeline.run import make_accelerator
    from draftsmith.train.pipeline.run_folder import check_folders
    from draftsmith.train.pipeline.run_target import RunTarget
    from draftsmith.train.recipe.drafter_config import drafter_config, sketch_drafter
    from draftsmith.train.recipe.load import load_recipe

    checked = load_recipe(recipe, [*(overrides or ()), "features.mode=cache"])
    number = parse_part(part)
    check_folders(checked)
    accelerator = make_accelerator(checked.model_copy(update={"trackers": []}))
    checked = with_adapted_target(checked, accelerator)
    config = drafter_config(checked, checked.target.sketch(accelerator.device))
    sketch = sketch_drafter(checked, config)
    stages = Stages(enabled=accelerator.is_main_process)
    target = RunTarget(checked, accelerator, config.tap_layers, stages)
    tokenizer = checked.target.load_tokenizer()
    for name, stage in checked.training_stages():
        data = prepare_data(stage, target, tokenizer, accelerator, stages, name)
        needed = needed_features(stage, target, data, sketch.reads_start_text)
        fill(stage, target, needed, stages, number)


def train(
    recipe: RecipeFile,
    overrides: Overrides = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would happen, and stop.")
    ] = False,
) -> None:
    """Run a recipe, from its data to a measured drafter. Responses are regenerated, the drafter is
    trained, exported, measured, and held to the recipe's gates. The same command goes on with a run
    that was stopped. Exit code 1: a gate is missed."""
    from draftsmith.train.pipeline.run import run
    from draftsmith.train.trainer.trainer import Interrupted

    try:
        code = run(recipe, overrides or (), dry_run=dry_run)
    except Interrupted as stop:  # it says where the run has saved itself
        Console(stderr=True, soft_wrap=True).print(Text(str(stop), style="yellow"))
        code = 143
    raise typer.Exit(code)


def compare(
    recipes: Annotated[
        list[Path], typer.Argument(metavar="RECIPE", help="Recipe files; names must differ.")
    ],
    minutes: Annotated[float, typer.Option(min=0.01, help="Training time of each.")] = 3.0,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Optimizer steps of each, in place of minutes.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of the runs and of the table.")] = Path(
        "runs/compare"
    ),
    override: Annotated[
        list[str] | None, typer.Option("--set", help="section.key=value for all of them.")
    ] = None,
) -> None:
    """Train several recipes alike, and compare the drafters. Each is trained for the same time or
    the same steps, and measured."""
    from rich.table import Table

    from draftsmith.train.pipeline.compare import FILE, Budget, compare_recipes, rows

    budget: Budget = {"max_minutes": minutes} if steps is None else {"steps": steps}
    title = f"{minutes:g} minutes" if steps is None else f"{steps:,} steps"
    entries = []
    try:
        for entry in compare_recipes(recipes, budget, out, override or ()):
            entries.append(entry)
    finally:  # what was measured is shown, whatever ended the others
        if entries:
            heads, *lines = rows(entries)
            table = Table(*heads, title=f"{title} of training each")
            for line in lines:
                table.add_row(*line)
            Console().print(table, f"{out / FILE}", highlight=False)
