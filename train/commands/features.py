"""The command `cache-features`: the features of a recipe's training rows, written ahead of the run that reads them.

Several processes may each write a part, on machines that share the folder. Knows the recipe and the stages; what is
written where is `train.pipeline.features_stage`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from train.commands.options import Part, parse_part


def cache_features(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="A recipe: a YAML file.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[SECTION.KEY=VALUE]...", help="Overrides, as of `train`.")
    ] = None,
    part: Part = "1/1",
) -> None:
    """Write the target's features of a recipe's training rows to disk, for runs with features.mode: cache."""
    from train.recipe.load import load_recipe

    checked = load_recipe(recipe, [*(overrides or ()), "features.mode=cache"])
    write(checked, parse_part(part))


def write(recipe, part: tuple[int, int] = (0, 1)) -> None:
    """Of every stage of the training. DraftsmithError for what the user can mend; run again, it continues."""
    from inference.entrypoints.loading import load_tokenizer
    from speculators.target.frozen_target import FrozenTarget
    from train.pipeline.data_stage import RunData
    from train.pipeline.features_stage import Writer, fill, open_cache
    from train.pipeline.progress import Stages
    from train.pipeline.run import load_target, make_accelerator
    from train.recipe.drafter_config import drafter_config

    accelerator = make_accelerator(recipe.model_copy(update={"trackers": []}))
    probe = load_target(recipe, accelerator, ())
    target = FrozenTarget(probe.model, drafter_config(recipe, probe).tap_layers)
    probe.close()
    t = recipe.target
    tokenizer = load_tokenizer(t.model, None, revision=t.revision, trust_remote_code=t.trust_remote_code)
    stages = Stages(2 * len(recipe.training_stages()), enabled=accelerator.is_main_process)
    for name, stage in recipe.training_stages():
        data = RunData(stage, target, tokenizer, accelerator, stages, stage=name)
        rows = data.training_rows()
        del data.llm
        fill(stage, data, rows, open_cache(stage, data, stages).scan(), stages, Writer(part))
