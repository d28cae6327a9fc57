"""`draftsmith refresh`: its options. Torch is imported when it runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from draftsmith.speculators.errors import ConfigError
from draftsmith.train.commands.options import Overrides, RecipeFile, ServedNames, command_of


@dataclass(frozen=True)
class RefreshOptions:
    """What `draftsmith refresh` takes."""

    recipe: RecipeFile
    overrides: Overrides = None
    log: Annotated[
        Path | None, typer.Option(help="Log of the server's traffic, as of `serve --log`.")
    ] = None
    days: Annotated[
        float, typer.Option(min=0.001, help="Days of the log, back from its newest exchange.")
    ] = 1.0
    minutes: Annotated[float, typer.Option(min=0.01, help="Training time.")] = 20.0
    share: Annotated[
        float,
        typer.Option(
            min=0,
            max=0.9,
            help="Part of the supervised tokens from the data that the head was trained on.",
        ),
    ] = 0.3
    rate: Annotated[
        float,
        typer.Option(min=0.001, max=1, help="Part of the recipe's learning rates to train at."),
    ] = 0.3
    served_model_name: ServedNames = None
    undo: Annotated[bool, typer.Option("--undo", help="Bring the head before back.")] = False


def run(options: RefreshOptions) -> None:
    """Continue a recipe's head on a server's newest traffic. It is exported if it drafts better for
    the newest texts of the log and has not forgotten the old ones. Exit code 0: exported; 1: the
    old head stays; 2: it cannot be done, or the log holds too little. The same command goes on with
    a refresh that was stopped."""
    from draftsmith.train.pipeline.refresh import RefreshSettings, refresh, undo
    from draftsmith.train.recipe.load import load_recipe
    from draftsmith.train.trainer.trainer import Interrupted

    recipe = load_recipe(options.recipe, options.overrides or ())
    if options.undo and options.log is not None:
        raise ConfigError("an undo reads no log: give one of --log and --undo", where="--undo")
    if options.undo:
        done = "the head before is exported again"
        if not undo(recipe):
            done = "a swap that was killed is finished; --undo again swaps the two heads"
        Console().print(f"{recipe.output_dir}: {done}", highlight=False)
        return
    if options.log is None:
        raise ConfigError("give the folder of the log, or --undo", where="--log")
    settings = RefreshSettings(
        log=str(options.log),
        days=options.days,
        minutes=options.minutes,
        share=options.share,
        rate=options.rate,
        names=tuple(options.served_model_name or ()),
    )
    try:
        code = refresh(recipe, settings)
    except Interrupted as stop:  # it says where it has saved itself
        Console(stderr=True, soft_wrap=True).print(Text(str(stop), style="yellow"))
        code = 143
    raise typer.Exit(code)


refresh = command_of("refresh", RefreshOptions, run)
