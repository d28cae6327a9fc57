"""`draftsmith cache-features`: the features of a recipe's training rows, written ahead of the run
that reads them.

Several processes may each write a part, on machines that share the folder.
"""

from __future__ import annotations

from draftsmith.train.commands.options import Overrides, Part, RecipeFile, parse_part


def cache_features(recipe: RecipeFile, overrides: Overrides = None, part: Part = "1/1") -> None:
    """Write the target's features of a recipe's training rows to disk, for runs with features.mode:
    cache."""
    from draftsmith.train.pipeline.adapted_target import with_adapted_target
    from draftsmith.train.pipeline.data_stage import DataStage, TrainingData
    from draftsmith.train.pipeline.features_stage import fill, open_cache
    from draftsmith.train.pipeline.progress import Stages
    from draftsmith.train.pipeline.run import load_target, make_accelerator
    from draftsmith.train.recipe.drafter_config import drafter_config
    from draftsmith.train.recipe.load import load_recipe

    checked = load_recipe(recipe, [*(overrides or ()), "features.mode=cache"])
    number = parse_part(part)
    accelerator = make_accelerator(checked.model_copy(update={"trackers": []}))
    checked = with_adapted_target(checked, accelerator)
    taps = drafter_config(checked, checked.target.sketch(accelerator.device)).tap_layers
    target, tokenizer = load_target(checked, accelerator, taps), checked.target.load_tokenizer()
    stages = Stages(enabled=accelerator.is_main_process)
    for name, stage in checked.training_stages():
        texts = DataStage(stage, target, tokenizer, accelerator, stages, stage=name)
        data = TrainingData(texts.training_rows(), [], {}, texts.tokenizer, texts.hashes)
        del texts  # and the engine that wrote them
        fill(stage, target, data.rows, open_cache(stage, target, data).scan(), stages, number)
