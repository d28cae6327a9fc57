"""`draftsmith serving-args`: the command of the vLLM servers that a recipe's training needs."""

from __future__ import annotations

from typing import Annotated

import typer

from draftsmith.train.commands.options import Overrides, RecipeFile


def serving_args(
    recipe: RecipeFile,
    overrides: Overrides = None,
    cpu: Annotated[
        bool, typer.Option("--cpu", help="For vLLM's CPU build, with this project's connector.")
    ] = False,
) -> None:
    """Print the command of servers that give hidden states. It is a `vllm serve` for the recipe's
    features.endpoints; such servers write responses as well (regenerate.endpoints)."""
    from draftsmith.train.features.serving_args import serving_args as words_of
    from draftsmith.train.features.serving_args import shell_command
    from draftsmith.train.features.states_spec import StatesSpec, states_root
    from draftsmith.train.recipe.drafter_config import drafter_config
    from draftsmith.train.recipe.load import load_recipe

    checked = load_recipe(recipe, overrides or ())
    sketch = checked.target.sketch()
    spec = StatesSpec.of_recipe(checked, drafter_config(checked, sketch).tap_layers, sketch)
    words = words_of(checked, spec, states_root(checked.features.states_dir), on_cpu=cpu)
    typer.echo(shell_command(words, on_cpu=cpu))
