"""`draftsmith plan`: time and memory of a recipe on given devices, by train/planner."""

from __future__ import annotations

from typing import Annotated

import typer

from draftsmith.train.commands.options import Overrides, RecipeFile


def plan(
    recipe: RecipeFile,
    overrides: Overrides = None,
    gpu: Annotated[
        str | None, typer.Option(help="Device, such as h100; without it no time is given.")
    ] = None,
    count: Annotated[
        int, typer.Option(min=1, help="Devices, each with a process, on one host.")
    ] = 1,
    examples: Annotated[
        int | None,
        typer.Option(
            min=1, help="Conversations of each training source that is not on this machine."
        ),
    ] = None,
) -> None:
    """Estimate time and memory of a recipe on given devices. Exit code 1: target and drafter
    do not fit."""
    from draftsmith.train.planner.describe import describe
    from draftsmith.train.planner.devices import find_device
    from draftsmith.train.planner.plan import make_plan
    from draftsmith.train.recipe.load import load_recipe

    device = None if gpu is None else find_device(gpu)
    estimate = make_plan(load_recipe(recipe, overrides or ()), device, count, examples=examples)
    describe(estimate)
    raise typer.Exit(0 if estimate.fits else 1)
