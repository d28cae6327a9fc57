"""`draftsmith regenerate`: writes the responses of a recipe ahead of its training, which then finds
them.

The machines that write (a cluster of servers) and those that train need not wait for each other.
With endpoints the target is loaded only with --check-target."""

from __future__ import annotations

from typing import Annotated

import typer

from draftsmith.speculators.errors import ConfigError
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

    from draftsmith.inference.entrypoints.loading import load_tokenizer
    from draftsmith.train.pipeline.adapted_target import with_adapted_target
    from draftsmith.train.pipeline.data_stage import DataStage
    from draftsmith.train.pipeline.progress import Stages
    from draftsmith.train.pipeline.run import load_target
    from draftsmith.train.recipe.load import load_recipe

    own_part, checked = parse_part(part), load_recipe(recipe, overrides or ())
    parts = [(name, each) for name, each in checked.training_stages() if each.regenerate.enabled]
    held_out = bool(checked.data.validation)
    if not parts and not held_out:
        raise ConfigError(
            "regenerate.enabled is false and there is no data.validation; nothing is written",
            where=f"{recipe}",
        )
    stages, accelerator = (
        Stages(len(parts) + len(checked.training_stages()) * held_out),
        Accelerator(),
    )
    checked = with_adapted_target(checked, accelerator)
    t = checked.target
    tokenizer = load_tokenizer(
        t.model, None, revision=t.revision, trust_remote_code=t.trust_remote_code
    )
    target = None
    for name, each in checked.training_stages():
        if target is None and (check_target or not each.regenerate.endpoints):
            target = load_target(checked, accelerator, ())
        data = DataStage(each, target, tokenizer, accelerator, stages, stage=name, part=own_part)
        if each.regenerate.enabled:
            data.responses()
        data.held_out()
