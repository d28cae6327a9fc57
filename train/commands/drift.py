"""`draftsmith drift`: its options. Torch is imported when it runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from draftsmith.train.commands.options import Overrides, RecipeFile, ServedNames, command_of


@dataclass(frozen=True)
class DriftOptions:
    """What `draftsmith drift` takes."""

    recipe: RecipeFile
    log: Annotated[
        Path,
        typer.Option(help="Log of the server's traffic, as of `serve --log`."),
    ]
    overrides: Overrides = None
    days: Annotated[int, typer.Option(min=1, help="Days, back from the log's newest exchange.")] = 7
    sample: Annotated[
        int,
        typer.Option(min=0, help="Exchanges of a day to replay, at most; 0: counters alone."),
    ] = 100
    served_model_name: ServedNames = None


def run(options: DriftOptions) -> None:
    """Say whether a head still drafts well. By day of a log, and by cluster of its prompts:
    acceptance from the counters in the log, else by replay of a sample. Exit code 0: nothing to do;
    1: a refresh is worth it; 2: it cannot be said, or the log holds too little."""
    from draftsmith.train.pipeline.drift import DriftSettings, drift
    from draftsmith.train.recipe.load import load_recipe

    settings = DriftSettings(
        log=str(options.log),
        days=options.days,
        sample=options.sample,
        names=tuple(options.served_model_name or ()),
    )
    raise typer.Exit(drift(load_recipe(options.recipe, options.overrides or ()), settings))


drift = command_of("drift", DriftOptions, run)
