"""One run from a recipe to a measured drafter: data -> regenerate -> train -> export -> acceptance.

Every stage leaves its result below the run's folder and is skipped when it is there already, so
that running the same command again continues."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Hashable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed

from draftsmith.inference.evaluation.expected_acceptance import Text, expected_acceptance
from draftsmith.inference.evaluation.suites import load_suite
from draftsmith.inference.progress import Stages
from draftsmith.inference.spec_decode.replay import ReplayResult, standard_error
from draftsmith.inference.whole_file import write_whole
from draftsmith.speculators.drafter import Drafter
from draftsmith.speculators.export.upload import account
from draftsmith.speculators.precision import autocast_dtype, free_memory, own_device
from draftsmith.speculators.target.target_head import TargetHead
from draftsmith.train.on_policy.refresh import OnPolicy
from draftsmith.train.pipeline import trackers
from draftsmith.train.pipeline.acceptance_stage import accept, engines_of
from draftsmith.train.pipeline.adapted_target import with_adapted_target
from draftsmith.train.pipeline.data_stage import prepare_data
from draftsmith.train.pipeline.drafter_stage import make_drafter, meet_tokenizers
from draftsmith.train.pipeline.export_stage import Trained, export
from draftsmith.train.pipeline.features_stage import training_features
from draftsmith.train.pipeline.run_folder import claimed
from draftsmith.train.pipeline.run_target import RunTarget
from draftsmith.train.planner.plan import short_budgets
from draftsmith.train.processes import (
    RunAccelerator,
    gather_in_turn,
    in_turn,
    is_shared,
    on_first,
    require_same,
)
from draftsmith.train.recipe.drafter_config import drafter_config, sketch_drafter
from draftsmith.train.recipe.load import load_recipe
from draftsmith.train.recipe.recipe import RECIPE, Recipe
from draftsmith.train.regeneration.store import Response
from draftsmith.train.trainer import checkpoint
from draftsmith.train.trainer.checkpoint import fingerprint
from draftsmith.train.trainer.joint_target import JointTarget
from draftsmith.train.trainer.parallel import shard_over_processes
from draftsmith.train.trainer.trainer import ERROR, EXPECTED, Evaluate, Trainer, held_out_result


def run(path: str | Path, overrides: Sequence[str] = (), *, dry_run: bool = False) -> int:
    """Runs a recipe; 0, or 1 if a gate is missed. DraftsmithError for what the user can mend."""
    recipe = load_recipe(path, overrides)
    if dry_run:
        from draftsmith.train.planner.describe import describe
        from draftsmith.train.planner.devices import this_machine
        from draftsmith.train.planner.plan import make_plan

        print(recipe.resolved_yaml())
        describe(make_plan(recipe, this_machine()))
        return 0
    if recipe.export.push_to_hub:
        account()  # a token that is of no use is noticed now, and not after the training
    engines_of(recipe)  # and so is a vLLM that a gate needs, and a suite that is not there
    for name, file in recipe.evaluation.suite_paths.items():
        load_suite(name, file)
    accelerator = make_accelerator(recipe)
    with claimed(accelerator, Path(recipe.output_dir)):
        return run_claimed(recipe, accelerator)


def run_claimed(recipe: Recipe, accelerator: Accelerator) -> int:
    """`run` in a folder that belongs to it."""
    stages = Stages(enabled=accelerator.is_main_process)
    for warning in short_budgets(recipe, accelerator.num_processes) if stages.enabled else ():
        stages.say(warning)
    trackers.start(recipe, accelerator)
    set_seed(recipe.training.seed)
    recipe_text = recipe.resolved_yaml()
    if not is_shared(accelerator, Path(recipe.output_dir)):
        stages.say("      the first process alone keeps the run, as others do not see its folder")
    recipe = with_adapted_target(recipe, accelerator)
    trained = train(recipe, accelerator, stages, recipe_text)
    accelerator.wait_for_everyone()
    code = 0
    if accelerator.is_main_process:
        with stages.stage("export"):
            export(recipe, trained)
        steps = trained.state.step
        del trained  # what is measured is loaded from the export, and needs the memory
        free_memory()
        code = accept(recipe, stages=stages)
        trackers.log_report(recipe, accelerator, steps)
        if recipe.export.push_to_hub:
            from draftsmith.train.pipeline.publish import push_run

            push_run(recipe, code, stages.say)
    accelerator.end_training()
    return code


def make_accelerator(recipe: Recipe) -> Accelerator:
    """Precision and trackers of the recipe. ConfigError names a tracker that is not installed."""
    trackers.require(recipe)
    device = own_device()
    autocast = autocast_dtype(recipe.training.mixed_precision, device)
    accelerator = RunAccelerator(
        cpu=device.type == "cpu",  # said aloud, since processes on CPUs find each other only then
        mixed_precision="bf16" if autocast == torch.bfloat16 else "no",
        log_with=list(recipe.trackers) or None,
        project_dir=recipe.output_dir,
    )
    # With FSDP accelerate's default is that transformers fills a model's weights in the first
    # process only and leaves the others' as memory happens to be; here every process reads its own.
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
    return accelerator


def train(
    recipe: Recipe, accelerator: Accelerator, stages: Stages, recipe_text: str = ""
) -> Trained:
    """Every stage of the training, one after the other. `recipe_text`: the recipe as YAML, which is
    written beside the checkpoints once none of any stage is left that could refuse it."""
    config = drafter_config(recipe, recipe.target.sketch(accelerator.device))
    # What cannot be drafted is refused before anything is loaded.
    sketch = sketch_drafter(recipe, config)
    target = RunTarget(recipe, accelerator, config.tap_layers, stages)
    tokenizer = recipe.target.load_tokenizer()
    drafter = None
    previous = ""
    every = recipe.training_stages()
    for number, (name, part) in enumerate(every, 1):
        data = prepare_data(part, target, tokenizer, accelerator, stages, name)
        reads_start_text = drafter is None and sketch.reads_start_text
        features = training_features(part, target, data, accelerator, stages, reads_start_text)
        folder = recipe.checkpoints(name)
        if drafter is None:
            drafter = make_drafter(part, config, target.head, features, stages, folder)
            meet_tokenizers(recipe, drafter, tokenizer)
            if target.held is not None:
                shard_over_processes(accelerator, target.held, recipe.target.sharding)
        data_hash = checkpoint.hash_rows(data.rows, data.prompts)
        previous = fingerprint(part, data.hashes.combined, previous, data_hash)
        _agree_on_training(accelerator, folder, previous, stages)
        later = any(checkpoint.latest(recipe.checkpoints(after)) for after, _ in every[number:])
        trainer = Trainer(
            part,
            target.head,
            drafter,
            features,
            accelerator=accelerator,
            folder=folder,
            fingerprint=previous,
            evaluate=_evaluation(part, target.head, data.held_out, accelerator),
            joint=_joint(part, target),
            on_policy=_on_policy(part, target, data.prompts, tokenizer, folder),
            measure=held_out_measure(part, data.held_out),
            say=stages.say,
        )
        stages.say(f"      {trainer.training.describe()}")
        if recipe_text and accelerator.is_main_process and not later:
            write_whole(Path(recipe.output_dir) / RECIPE, recipe_text)
        title = f"train {recipe.family}{f': {name}' if name else ''}"
        with closing(features):
            state = _train_stage(trainer, stages, title)
    assert drafter is not None  # a recipe has at least one stage
    return Trained(drafter, state, tokenizer, data.held_out, trainer.joint)


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


def _train_stage(trainer: Trainer, stages: Stages, title: str) -> checkpoint.TrainState:
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


def _evaluation(
    recipe: Recipe,
    target: TargetHead,
    held_out: dict[float, list[Response]],
    accelerator: Accelerator,
) -> Evaluate | None:
    """None: nothing is held out. The processes of a sharded target run it together, on one text."""
    shared = accelerator if recipe.target.sharding == "none" else None
    return held_out_evaluation(recipe, target, held_out, shared) if held_out else None


def _on_policy(
    recipe: Recipe,
    target: RunTarget,
    prompts: Sequence[tuple[int, ...]],
    tokenizer: Any,
    folder: Path,
) -> OnPolicy | None:
    if recipe.on_policy is None:
        return None
    return OnPolicy(
        recipe,
        target.whole(),
        prompts,
        folder=folder,
        accelerator=target.accelerator,
        tokenizer=tokenizer,
    )


def _joint(recipe: Recipe, target: RunTarget) -> JointTarget | None:
    if recipe.joint is None:
        return None
    return JointTarget(target.whole(), recipe.joint, recipe.training.seed)


def held_out_measure(recipe: Recipe, held_out: dict[float, list[Response]]) -> str:
    """A hash of all that `held_out_evaluation` depends on beside the drafter."""
    e = recipe.evaluation
    texts = {t: [(r.prompt_ids, r.output_ids) for r in rs] for t, rs in held_out.items()}
    settings = [e.num_speculative_tokens, e.top_p, e.top_k, texts]
    return hashlib.sha256(json.dumps(settings).encode()).hexdigest()


def held_out_evaluation(
    recipe: Recipe,
    target: TargetHead,
    held_out: dict[float, list[Response]],
    accelerator: Accelerator | None = None,
) -> Evaluate:
    """Expected acceptance length (exact replay) on texts the target wrote, per temperature, and
    their mean, each with its standard error. `held_out` was written with the filters of
    `evaluation` and is replayed under them, as the report's runtime does. `accelerator`: its
    processes share the texts, and all have the results; None: this one replays all."""
    e = recipe.evaluation

    def replayed(drafter: Drafter, texts: Sequence[Text], t: float) -> list[ReplayResult]:
        return expected_acceptance(
            target, drafter, texts, t, e.num_speculative_tokens, top_p=e.top_p, top_k=e.top_k
        )

    def evaluate(drafter: Drafter) -> dict[str, float]:
        figures: dict[str, float] = {}
        samples = []
        lengths = []
        for t, responses in held_out.items():
            texts = [(r.prompt_ids, r.output_ids) for r in responses]
            if accelerator is None:
                results = replayed(drafter, texts, t)
            else:
                part = replayed(drafter, in_turn(accelerator, texts), t)
                results = gather_in_turn(accelerator, part, len(texts))
            sample: dict[Hashable, ReplayResult] = {}
            for (prompt, _), result in zip(texts, results, strict=True):
                sample[prompt] = sample.get(prompt, ReplayResult()) + result
            samples.append(sample)
            lengths.append(sum(results, ReplayResult()).expected_acceptance_length)
            figures[f"{EXPECTED}_t{t:g}"] = lengths[-1]
            figures[f"{ERROR}_t{t:g}"] = standard_error([sample])
        mean = sum(lengths) / len(lengths)
        return figures | {EXPECTED: mean, ERROR: standard_error(samples)}

    return evaluate
