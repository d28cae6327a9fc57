"""The training of a run: its stages one after the other, each with its data, features and trainer.

A stage that was trained before is not trained again: its trainer finds its last checkpoint, whose
budget is spent, and loads the best weights."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from draftsmith.inference.progress import Stages
from draftsmith.inference.whole_file import write_whole
from draftsmith.speculators.config import DrafterConfig
from draftsmith.speculators.drafter import Drafter
from draftsmith.train.features.row_features import RowFeatures
from draftsmith.train.on_policy.refresh import OnPolicy
from draftsmith.train.pipeline import trackers
from draftsmith.train.pipeline.data_stage import Prepare, TrainingData, prepare_data
from draftsmith.train.pipeline.drafter_stage import make_drafter, meet_tokenizers
from draftsmith.train.pipeline.export_stage import Trained
from draftsmith.train.pipeline.features_stage import training_features
from draftsmith.train.pipeline.held_out import held_out_evaluation, held_out_measure
from draftsmith.train.pipeline.run_target import RunTarget
from draftsmith.train.processes import on_first, require_same
from draftsmith.train.recipe.drafter_config import drafter_config, sketch_drafter
from draftsmith.train.recipe.recipe import RECIPE, Recipe
from draftsmith.train.trainer import checkpoint
from draftsmith.train.trainer.checkpoint import fingerprint
from draftsmith.train.trainer.joint_target import JointTarget
from draftsmith.train.trainer.parallel import shard_over_processes
from draftsmith.train.trainer.step_records import held_out_result
from draftsmith.train.trainer.trainer import Evaluate, Trainer


def train(
    recipe: Recipe,
    accelerator: Accelerator,
    stages: Stages,
    recipe_text: str = "",
    prepare: Prepare = prepare_data,
) -> Trained:
    """Every stage of the training, one after the other. `recipe_text`: the recipe as YAML, which is
    written beside the checkpoints once none of any stage is left that could refuse it. `prepare`:
    makes the data of a stage."""
    config = drafter_config(recipe, recipe.target.sketch(accelerator.device))
    # What cannot be drafted is refused before anything is loaded.
    reads_start_text = sketch_drafter(recipe, config).reads_start_text
    target = RunTarget(recipe, accelerator, config.tap_layers, stages)
    training = _Training(recipe, target, recipe.target.load_tokenizer(), recipe_text, prepare)
    (name, part), *later = recipe.training_stages()
    first = training.inputs(name, part, reads_start_text)
    drafter = training.new_drafter(first, config)
    trained = training.train(first, drafter)
    for name, part in later:
        trained = training.train(training.inputs(name, part), drafter)
    return trained


@dataclass(frozen=True)
class _Inputs:
    """What a stage of the training begins with. `name`: empty if there is one stage only; `recipe`:
    the stage's; `folder`: of its checkpoints."""

    name: str
    recipe: Recipe
    data: TrainingData
    features: RowFeatures
    folder: Path


class _Training:
    """The stages of one training, which go on from one another."""

    def __init__(
        self,
        recipe: Recipe,
        target: RunTarget,
        tokenizer: Any,
        recipe_text: str,
        prepare: Prepare,
    ) -> None:
        self.recipe = recipe
        self.prepare = prepare
        self.target = target
        self.tokenizer = tokenizer
        self.recipe_text = recipe_text
        self.accelerator = target.accelerator
        self.stages = target.stages
        self.fingerprint = ""  # of the newest stage, and of those before it
        self.start_seconds = 0.0  # that the start of the drafter took; a stage's budget pays them

    def inputs(self, name: str, recipe: Recipe, reads_start_text: bool = False) -> _Inputs:
        """The data and features of a stage. `reads_start_text`: its drafter is fitted to a text
        that servers have to have room for. CheckpointError: another recipe trained there."""
        folder = self.recipe.checkpoints(name)
        on_first(self.accelerator, lambda: checkpoint.require_recipe(folder, recipe))
        data = self.prepare(
            recipe, self.target, self.tokenizer, self.accelerator, self.stages, name
        )
        features = training_features(
            recipe, self.target, data, self.accelerator, self.stages, reads_start_text
        )
        return _Inputs(name, recipe, data, features, folder)

    def new_drafter(self, first: _Inputs, config: DrafterConfig) -> Drafter:
        """The drafter that all stages train, before the first one."""
        head = self.target.head
        # asked of the first alone: the others may not see its disk
        newest = on_first(self.accelerator, lambda: checkpoint.latest(first.folder))
        began = time.monotonic()
        drafter = make_drafter(
            first.recipe,
            config,
            head,
            first.features,
            self.stages,
            resumes=newest is not None,
        )
        self.start_seconds = time.monotonic() - began
        meet_tokenizers(self.recipe, drafter, self.tokenizer)
        if self.target.held is not None:
            shard_over_processes(self.accelerator, self.target.held, self.recipe.target.sharding)
        return drafter

    def train(self, stage: _Inputs, drafter: Drafter) -> Trained:
        """Trains one stage, or finds it trained."""
        data = stage.data
        rows = checkpoint.hash_rows(data.rows, data.prompts)
        self.fingerprint = fingerprint(stage.recipe, data.hashes.combined, self.fingerprint, rows)
        _agree_on_training(self.accelerator, stage.folder, self.fingerprint, self.stages)
        trainer = self._trainer(stage, drafter)
        trainer.state.seconds = self.start_seconds  # unless a checkpoint has more
        self.start_seconds = 0.0
        if stage.recipe.training.preset == "auto":  # the run did not know it before it had the rows
            self.stages.say(f"      {trainer.training.describe()}")
        self._write_recipe(stage)
        trackers.log_training(stage.name, trainer.training, self.accelerator)
        title = f"train {self.recipe.family}{f': {stage.name}' if stage.name else ''}"
        with closing(stage.features):
            state = _run_trainer(trainer, self.stages, title)
        return Trained(drafter, state, self.tokenizer, data.held_out, trainer.joint)

    def _trainer(self, stage: _Inputs, drafter: Drafter) -> Trainer:
        return Trainer(
            stage.recipe,
            self.target.head,
            drafter,
            stage.features,
            accelerator=self.accelerator,
            folder=stage.folder,
            fingerprint=self.fingerprint,
            evaluate=_evaluation(stage, self.target),
            joint=_joint(stage.recipe, self.target),
            on_policy=_on_policy(stage, self.target, self.tokenizer),
            measure=held_out_measure(stage.recipe, stage.data.held_out),
            say=self.stages.say,
        )

    def _write_recipe(self, stage: _Inputs) -> None:
        """Writes the recipe, unless a later stage has a checkpoint, which could still refuse it."""
        if not (self.recipe_text and self.accelerator.is_main_process):
            return
        names = [name for name, _ in self.recipe.training_stages()]
        later = names[names.index(stage.name) + 1 :]
        if not any(checkpoint.latest(self.recipe.checkpoints(name)) for name in later):
            write_whole(Path(self.recipe.output_dir) / RECIPE, self.recipe_text)


def _agree_on_training(
    accelerator: Accelerator, folder: Path, expected: str, stages: Stages
) -> None:
    """ConfigError if the processes have different fingerprints; CheckpointError if the checkpoints
    in the first one's `folder` have another, or none is whole."""
    require_same(
        accelerator,
        expected,
        "the processes have different recipes, targets or training rows; give all machines the same"
        " files",
        where="processes",
    )

    def check() -> None:
        checkpoint.set_aside_damaged(folder, lambda text: stages.say(f"      {text}"))
        newest = checkpoint.latest(folder)
        if newest is not None:
            checkpoint.load(newest, expected)

    on_first(accelerator, check)


def _run_trainer(trainer: Trainer, stages: Stages, title: str) -> checkpoint.TrainState:
    """Trains, and leaves the weights of the best held-out evaluation in the drafter, if any."""
    with stages.stage(title, 1) as advance:
        state = trainer.run(advance)
    if state.best_value is not None:
        trainer.load_best()
        stages.say(
            "      best of the held-out evaluations:"
            f" {held_out_result(state.history, state.best_step)}"
        )
    return state


def _evaluation(stage: _Inputs, target: RunTarget) -> Evaluate | None:
    """None: nothing is held out. The processes of a sharded target run it together, on one text."""
    held_out = stage.data.held_out
    if not held_out:
        return None
    shared = target.accelerator if stage.recipe.target.sharding == "none" else None
    return held_out_evaluation(stage.recipe, target.head, held_out, shared)


def _on_policy(stage: _Inputs, target: RunTarget, tokenizer: Any) -> OnPolicy | None:
    if stage.recipe.on_policy is None:
        return None
    return OnPolicy(
        stage.recipe,
        target.whole(),
        stage.data.prompts,
        folder=stage.folder,
        accelerator=target.accelerator,
        tokenizer=tokenizer,
    )


def _joint(recipe: Recipe, target: RunTarget) -> JointTarget | None:
    if recipe.joint is None:
        return None
    seed = recipe.training.seed
    return JointTarget(target.whole(), recipe.joint, seed, recipe.target.revision)
