"""One run from a recipe to a measured drafter: data -> regenerate -> train -> export -> acceptance.

Every stage leaves its result below the run's folder and is passed over when it is there already, so running the same
command again continues. Knows the order of the stages and nothing of how they work.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs, set_seed

from inference.entrypoints.loading import load_tokenizer
from inference.evaluation.expected_acceptance import expected_acceptance
from inference.spec_decode.replay import ReplayResult, standard_error
from speculators.drafter import Drafter
from speculators.errors import ConfigError
from speculators.export import describe_target
from speculators.export.upload import account
from speculators.precision import as_dtype, autocast_dtype, free_memory, own_device
from speculators.target.frozen_target import FrozenTarget
from train.data.packing import conversation_tokenizer
from train.on_policy.refresh import OnPolicy
from train.on_policy.rollout import LLMWriter
from train.pipeline import trackers
from train.pipeline.acceptance_stage import require_engines
from train.pipeline.data_stage import RunData, waits_on_host
from train.pipeline.drafter_stage import make_drafter, meet_tokenizers
from train.pipeline.export_stage import write_formats
from train.pipeline.features_stage import training_features
from train.pipeline.progress import Stages
from train.planner.devices import total_memory
from train.planner.plan import require_memory_to_measure
from train.recipe.drafter_config import drafter_config, sketch_drafter
from train.recipe.load import load_recipe
from train.recipe.recipe import Recipe
from train.recipe.run_folder import RECIPE, TARGET
from train.regeneration.record import summary
from train.regeneration.store import Response
from train.trainer import checkpoint
from train.trainer.checkpoint import fingerprint
from train.trainer.joint_target import JointTarget
from train.trainer.parallel import share_out
from train.trainer.trainer import ERROR, EXPECTED, Trainer, held_out_figure

STAGES = ("regenerate", "held-out responses", "train")  # of each stage of the training
LAST_STAGES = ("export", "acceptance")
PATIENCE = timedelta(days=7)  # with which processes wait for the one that writes responses; torch's is ten minutes


def run(
    recipe_path: str | Path,
    overrides: Sequence[str] = (),
    *,
    dry_run: bool = False,
    families: Sequence[str] | None = None,
) -> int:
    """Runs a recipe; returns 0, or 1 when a gate in it is missed. Raises DraftsmithError for what the user can mend."""
    recipe = load_recipe(recipe_path, overrides)
    if families is not None and recipe.family not in families:
        raise ConfigError(f"{recipe_path}: family is {recipe.family!r}; this launcher trains {', '.join(families)}")
    if dry_run:
        from train.planner.dry_run import describe

        describe(recipe)
        return 0
    if recipe.export.push_to_hub:
        account()  # a token that is of no use is noticed now, and not after the training
    require_engines(recipe)
    accelerator = make_accelerator(recipe)
    require_memory_to_measure(recipe, total_memory(accelerator.device))
    set_seed(recipe.training.seed)
    folder = Path(recipe.output_dir)
    if accelerator.is_main_process:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / RECIPE).write_text(recipe.resolved_yaml())
    fits = getattr(recipe.drafter, "init", None) == "least_squares" and recipe.drafter.init_from is None
    cached = recipe.features.mode == "cache"
    count = (len(STAGES) + cached) * len(recipe.training_stages()) + len(LAST_STAGES) + fits
    stages = Stages(count, enabled=accelerator.is_main_process)
    trained = train(recipe, accelerator, stages)
    accelerator.wait_for_everyone()
    code = 0
    if accelerator.is_main_process:
        with stages.stage("export"):
            export(recipe, trained)
        history, steps = trained.state.history, trained.state.step
        del trained  # what is measured is loaded from the export, and needs the memory
        free_memory()
        from train.pipeline.acceptance_stage import accept

        code = accept(recipe, stages=stages, history=history)
        trackers.attach_report(recipe, accelerator, steps)
        if recipe.export.push_to_hub:
            _push(recipe, stages, code)
    accelerator.end_training()
    return code


def _push(recipe: Recipe, stages: Stages, code: int) -> None:
    from train.pipeline.publish import push_run

    if code:
        stages.say(f"not pushed to {recipe.export.hub_model_id}: a gate is missed")
    else:
        stages.say(push_run(recipe, stages.say).describe(str(recipe.export.hub_model_id)))


def make_accelerator(recipe: Recipe) -> Accelerator:
    """Precision and trackers of the recipe. ConfigError names a tracker that is not installed."""
    trackers.require(recipe)
    device = own_device()
    autocast = autocast_dtype(recipe.training.mixed_precision, device)
    accelerator = Accelerator(
        cpu=device.type == "cpu",  # said aloud, since processes on CPUs find each other only then
        mixed_precision="bf16" if autocast == torch.bfloat16 else "no",
        log_with=list(recipe.trackers) or None,
        project_dir=recipe.output_dir,
        kwargs_handlers=[InitProcessGroupKwargs(timeout=PATIENCE)],
    )
    # With FSDP accelerate's default is that transformers fills a model's weights in the first process only and leaves
    # the others' as memory happens to be; here every process reads its own.
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
    trackers.start(recipe, accelerator)
    return accelerator


# ---------------------------------------------------------------- target


def load_target(recipe: Recipe, accelerator: Accelerator, tap_layers: Sequence[int]) -> FrozenTarget:
    """On the device of this process, or for now in the host's memory if it is shared out before it is asked."""
    t = recipe.target
    return FrozenTarget.from_pretrained(
        t.model,
        tap_layers=tap_layers,
        dtype=t.dtype,
        device=accelerator.device,
        on_host=waits_on_host(recipe, accelerator),
        attn_implementation=t.attn_implementation,
        trust_remote_code=t.trust_remote_code,
        revision=t.revision,
    )


# ---------------------------------------------------------------- training


def checkpoints(recipe: Recipe, stage: str | None = None) -> Path:
    """The folder of a stage's checkpoints, by default of the last; without stages there is one."""
    root = Path(recipe.output_dir) / "checkpoints"
    names = [each.name for each in recipe.stages]
    return root / (stage or names[-1]) if names else root


@dataclass
class Trained:
    """What a training leaves: the drafter (and the adapter of the target) with the weights of the last stage's best
    held-out evaluation, its last ones without; the state, whose history is that of all stages; held-out texts."""

    drafter: Drafter
    state: checkpoint.TrainState
    tokenizer: Any
    held_out: dict[float, list[Response]]
    joint: JointTarget | None = None


def train(recipe: Recipe, accelerator: Accelerator, stages: Stages) -> Trained:
    """Every stage of the training, one after the other."""
    probe = load_target(recipe, accelerator, ())
    if waits_on_host(recipe, accelerator):
        unasked = "; endpoints are not compared with it" if recipe.regenerate.endpoints else ""
        stages.say(f"      the target waits in the host's memory, and goes to the devices a layer at a time{unasked}")
    config = drafter_config(recipe, probe)
    sketch_drafter(recipe, config)  # what cannot be drafted is refused before anything is generated
    target = FrozenTarget(probe.model, config.tap_layers)
    probe.close()
    tokenizer = load_tokenizer(
        recipe.target.model, None, revision=recipe.target.revision, trust_remote_code=recipe.target.trust_remote_code
    )
    drafter, history, before = None, [], ""
    for name, part in recipe.training_stages():
        data = RunData(part, target, tokenizer, accelerator, stages, stage=name)
        rows, held_out = data.training_rows(), data.held_out()
        prompts = data.prompts() if part.on_policy else []
        del data.llm
        features = training_features(part, data, rows, accelerator, stages)
        folder = checkpoints(recipe, name)
        if drafter is None:
            drafter = make_drafter(part, config, target, features, stages, folder)
            meet_tokenizers(recipe, drafter, tokenizer)
            share_out(accelerator, target, recipe.target.sharding)
            trained = sum(p.numel() for p in drafter.trainable_parameters())
            stages.say(
                f"      {recipe.family}: {trained / 1e6:.2f} M trainable parameters on a target of "
                f"{sum(p.numel() for p in target.parameters()) / 1e6:.1f} M"
                + (f"; taps {list(config.tap_layers)}" if config.tap_layers else "")
            )
        before = fingerprint(part, data.target_hash, before)
        joint = JointTarget(target, part.joint, part.training.seed) if part.joint else None
        trainer = Trainer(
            part,
            target,
            drafter,
            rows,
            accelerator=accelerator,
            folder=folder,
            fingerprint=before,
            evaluate=held_out_evaluation(part, target, held_out) if held_out else None,
            features=features,
            joint=joint,
            on_policy=_on_policy(part, target, tokenizer, prompts, accelerator, folder),
        )
        with stages.stage(f"train {recipe.family}{f': {name}' if name else ''}", 100) as advance:
            state = trainer.run(lambda share, note, advance=advance: advance(round(100 * share, 1), note))
        if state.best_value is not None:
            checkpoint.load_best(folder, drafter, joint)
            stages.say(f"      best of the held-out evaluations: {held_out_figure(state.history, state.best_step)}")
        history += state.history
    return Trained(drafter, replace(state, history=history), tokenizer, held_out, joint)


def _on_policy(
    recipe: Recipe,
    target: FrozenTarget,
    tokenizer: Any,
    prompts: Sequence[Sequence[int]],
    accelerator: Accelerator,
    folder: Path,
) -> OnPolicy | None:
    """The texts of a stage that has an `on_policy` section, and who writes them."""
    section = recipe.on_policy
    if section is None:
        return None
    drafts = section.num_speculative_tokens or recipe.evaluation.num_speculative_tokens
    writer = LLMWriter(
        target,
        num_speculative_tokens=None if recipe.drafter_writes() else drafts,
        sampling=recipe.regenerate.model_copy(
            update={"temperatures": section.temperatures or recipe.regenerate.temperatures}
        ),
        max_new_tokens=section.max_new_tokens,
        max_length=recipe.data.max_length,
        batch_size=recipe.regenerate.batch_size,
        tokenizer=tokenizer,
    )
    return OnPolicy(
        recipe,
        target,
        writer,
        prompts,
        folder=folder,
        process=accelerator.process_index,
        processes=accelerator.num_processes,
        pad_token_id=tokenizer.pad_token_id or 0,
    )


def held_out_evaluation(recipe: Recipe, target: FrozenTarget, held_out: dict[float, list[Response]]):
    """Expected acceptance length (exact replay) on texts the target wrote, per temperature, and their mean, each with
    its standard error. `held_out`: written with the filters of `evaluation` (`RunData.held_out`), under which they are
    replayed, so that it is what the report's runtime will do."""
    e = recipe.evaluation

    def evaluate(drafter: Drafter) -> dict[str, float]:
        figures, samples = {}, []
        for temperature, responses in held_out.items():
            texts = [(r.prompt_ids, r.output_ids) for r in responses]
            results = expected_acceptance(
                target, drafter, texts, temperature, e.num_speculative_tokens, top_p=e.top_p, top_k=e.top_k
            )
            figures[f"{EXPECTED}_t{temperature:g}"] = sum(results, ReplayResult()).expected_acceptance_length
            sample: dict[Hashable, ReplayResult] = {}
            for (prompt, _), result in zip(texts, results, strict=True):
                sample[prompt] = sample.get(prompt, ReplayResult()) + result
            samples.append(sample)
        mean = sum(figures.values()) / len(figures)
        errors = {f"{ERROR}_t{t:g}": standard_error([sample]) for t, sample in zip(held_out, samples, strict=True)}
        return {**figures, EXPECTED: mean, **errors, ERROR: standard_error(samples)}

    return evaluate


def export(recipe: Recipe, trained: Trained) -> Path:
    """`<output_dir>/export`, in the target checkpoint's dtype unless the recipe names one, further formats beside it;
    the target too if it was trained along."""
    drafter, state, out = trained.drafter, trained.state, Path(recipe.output_dir)
    dtype = drafter.target.checkpoint_dtype if recipe.export.dtype == "auto" else as_dtype(recipe.export.dtype)
    template = conversation_tokenizer(recipe.data, trained.tokenizer).template_facts()
    provenance = recipe.provenance(state.best_step or state.step) | template | summary(out)
    if trained.joint is not None:
        texts = [(r.prompt_ids, r.output_ids) for responses in trained.held_out.values() for r in responses]
        before, after = trained.joint.held_out_loss(texts)
        change = {"before": before, "after": after, "responses": len(texts)}
        trained.joint.export(out / TARGET, trained.tokenizer, change)
        provenance["target"] = describe_target(drafter.target) | {"name_or_path": str(out / TARGET)}
    return write_formats(recipe, drafter, dtype=dtype, provenance=provenance)
