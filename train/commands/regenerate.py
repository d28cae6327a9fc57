"""`draftsmith regenerate`: writes the responses of a recipe ahead of its training, which then finds
them.

The machines that write (a cluster of servers) and those that train need not wait for each other.
With endpoints the target is loaded only with --check-target."""

from __future__ import annotations

from typing import Annotated

import typer

from draftsmith.train.commands.options import Overrides, Part, RecipeFile, parse_part


def regenerate(
    recipe: RecipeFile,
    overrides: Overrides = None,
    part: Part = "1/1",
    check_target: Annotated[
        bool,
        typer.Option(
            "--check-target", help="Load the target here, and compare the endpoints with it."
        ),
    ] = False,
) -> None:
    """Write the responses of a recipe, at its endpoints if it names some; again, it continues."""
    from accelerate import Accelerator

    from draftsmith.train.pipeline.adapted_target import with_adapted_target
    from draftsmith.train.pipeline.data_stage import DataStage
    from draftsmith.train.pipeline.progress import Stages
    from draftsmith.train.pipeline.run import load_target
    from draftsmith.train.recipe.load import load_recipe

    own_part, checked = parse_part(part), load_recipe(recipe, overrides or ())
    stages, accelerator = Stages(), Accelerator()
    checked = with_adapted_target(checked, accelerator)
    tokenizer = checked.target.load_tokenizer()
    target = None
    for name, stage in checked.training_stages():
        if target is None and (check_target or not stage.regenerate.endpoints):
            target = load_target(checked, accelerator, ())
        data = DataStage(stage, target, tokenizer, accelerator, stages, stage=name, part=own_part)
        if stage.regenerate.enabled:
            data.responses()
        data.held_out()
