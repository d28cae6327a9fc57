"""One run from a recipe to a measured drafter: data -> regenerate -> train -> export -> acceptance.

Every stage leaves its result below the run's folder and is passed over when it is there already, so running the same
command again continues. Knows the order of the stages and nothing of how they work.
"""

from __future__ import annotations

import gc
import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed

from inference.expected import expected_acceptance
from inference.llm_loading import load_tokenizer
from inference.replay import ReplayResult
from speculators.config import DrafterConfig, config_for_target
from speculators.drafter import Drafter, family_class
from speculators.errors import ConfigError, DraftsmithError
from speculators.export import describe_target, load_weights, read_drafter_config, resolve
from speculators.export.upload import account
from speculators.target import FrozenTarget, TargetFeatures
from speculators.vocab import choose_draft_vocabulary, coverage
from train import checkpoint, trackers
from train.data import conversation_tokenizer
from train.engines import require_engines
from train.export_formats import fitting, write_formats
from train.feature_stage import training_features
from train.features import RowFeatures
from train.joint import FOLDER as TARGET
from train.joint import JointTarget
from train.loop import Interrupted, Trainer
from train.on_policy import OnPolicy
from train.processes import share_out
from train.progress import Stages
from train.recipe import Recipe
from train.recipe_load import load_recipe
from train.regenerate_record import summary
from train.responses import Response
from train.rollout import LLMWriter
from train.run_data import RunData

DEFAULT_DRAFT_VOCABULARY = 32_000
STAGES = ("regenerate", "held-out responses", "train")  # of each stage of the training
LAST_STAGES = ("export", "acceptance")


def launch(families: Sequence[str]) -> None:
    """Entry point of the launchers: `RECIPE [dotted.key=value ...] [--dry-run]`; exits with the run's status."""
    arguments = sys.argv[1:]
    options = [a for a in arguments if a.startswith("-")]
    rest = [a for a in arguments if not a.startswith("-")]
    if not rest or options not in ([], ["--dry-run"]):
        print(f"usage: {Path(sys.argv[0]).name} RECIPE.yaml [dotted.key=value ...] [--dry-run]", file=sys.stderr)
        sys.exit(2)
    try:
        sys.exit(run(rest[0], rest[1:], dry_run="--dry-run" in options, families=families))
    except Interrupted as stop:
        print(stop, file=sys.stderr)
        sys.exit(143)
    except DraftsmithError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


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
        from train.dry_run import describe

        describe(recipe)
        return 0
    if recipe.export.push_to_hub:
        account()  # a token that is of no use is noticed now, and not after the training
    require_engines(recipe)
    accelerator = make_accelerator(recipe)
    set_seed(recipe.training.seed)
    folder = Path(recipe.output_dir)
    if accelerator.is_main_process:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "recipe.yaml").write_text(recipe.resolved_yaml())
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
        gc.collect()
        from train.acceptance import accept

        code = accept(recipe, stages=stages, history=history)
        trackers.attach_report(recipe, accelerator, steps)
        if recipe.export.push_to_hub:
            _push(recipe, stages, code)
    accelerator.end_training()
    return code


def _push(recipe: Recipe, stages: Stages, code: int) -> None:
    from train.push import push_run

    if code:
        stages.say(f"not pushed to {recipe.export.hub_model_id}: a gate is missed")
    else:
        stages.say(push_run(recipe, stages.say).describe(str(recipe.export.hub_model_id)))


def make_accelerator(recipe: Recipe) -> Accelerator:
    """Precision and trackers of the recipe. ConfigError names a tracker that is not installed."""
    trackers.require(recipe)
    accelerator = Accelerator(
        cpu=not torch.accelerator.is_available(),  # said aloud, since processes on CPUs find each other only then
        mixed_precision=recipe.training.mixed_precision,
        log_with=list(recipe.trackers) or None,
        project_dir=recipe.output_dir,
    )
    trackers.start(recipe, accelerator)
    return accelerator


# ---------------------------------------------------------------- target


def load_target(recipe: Recipe, accelerator: Accelerator, tap_layers: Sequence[int]) -> FrozenTarget:
    t = recipe.target
    dtype = t.dtype if t.dtype == "auto" else getattr(torch, t.dtype)
    return FrozenTarget.from_pretrained(
        t.model,
        tap_layers=tap_layers,
        dtype=dtype,
        device=accelerator.device,
        attn_implementation=t.attn_implementation,
        trust_remote_code=t.trust_remote_code,
        revision=t.revision,
    )


# ---------------------------------------------------------------- drafter


def drafter_config(recipe: Recipe, target: FrozenTarget, *, planning: bool = False) -> DrafterConfig:
    """The recipe's drafter for this target; with `init_from`, that head's own, which the recipe may not contradict.
    `planning`: of a student's folder config.json will do."""
    options, fields = recipe.drafter, family_class(recipe.family).config_class.model_fields
    wanted = options.shape(fields, target)
    config_only = planning and recipe.family == "draft_model"
    if (start := start_folder(recipe, weights=not config_only)) is None:
        if "draft_vocab_size" in wanted and wanted["draft_vocab_size"] is None:
            wanted["draft_vocab_size"] = min(DEFAULT_DRAFT_VOCABULARY, target.vocab_size)
        return fitting(recipe, config_for_target(target, recipe.family, **wanted))
    config = read_drafter_config(start, target.num_layers, config_only=config_only)
    if config.family != recipe.family:
        raise ConfigError(
            f"drafter.init_from: {options.init_from} is of family {config.family!r}, the recipe's is {recipe.family!r}"
        )
    for key in options.model_fields_set & set(wanted):
        if wanted[key] is not None and wanted[key] != getattr(config, key):
            raise ConfigError(
                f"drafter.{key}: the recipe says {wanted[key]}, but the head of drafter.init_from "
                f"({options.init_from}) has {getattr(config, key)}; leave {key} out or start from scratch"
            )
    options.accept(config)
    return fitting(recipe, config)


def start_folder(recipe: Recipe, *, weights: bool = True) -> Path | None:
    """The folder whose head the recipe starts from (`target`: the target's own), None where it starts from scratch."""
    if recipe.drafter.init_from == "target":
        return resolve(recipe.target.model, recipe.target.revision)
    return None if recipe.drafter.init_from is None else resolve(recipe.drafter.init_from, weights=weights)


def checkpoints(recipe: Recipe, stage: str | None = None) -> Path:
    """The folder of a stage's checkpoints, by default of the last; without stages there is one."""
    root = Path(recipe.output_dir) / "checkpoints"
    names = [each.name for each in recipe.stages]
    return root / (stage or names[-1]) if names else root


def sketch_drafter(recipe: Recipe, config: DrafterConfig) -> Drafter:
    """The drafter without memory for its weights. ConfigError if the recipe wants more drafts than it can make, or
    longer texts."""
    with torch.device("meta"):
        drafter = family_class(config.family)(config)
    drafter.require_depth(recipe.evaluation.num_speculative_tokens, "evaluation.num_speculative_tokens")
    drafter.require_length(recipe.data.max_length, "data.max_length")
    for name, part in recipe.training_stages():
        if part.on_policy is not None and part.on_policy.num_speculative_tokens is not None:
            where = f"stages ({name}): on_policy" if name else "on_policy"
            drafter.require_depth(part.on_policy.num_speculative_tokens, f"{where}.num_speculative_tokens")
    return drafter


def make_drafter(
    recipe: Recipe, config: DrafterConfig, target: FrozenTarget, features: RowFeatures, stages: Stages, folder: Path
) -> Drafter:
    """A drafter ready to train: draft vocabulary chosen from the supervised tokens, weights warm or initialised (but
    not fitted where a checkpoint in `folder` will replace them)."""
    drafter = family_class(config.family)(config).attach(target)
    if (start := start_folder(recipe)) is not None:
        load_weights(drafter, start)
        return drafter
    if config.reduced_vocabulary:
        counts = torch.zeros(config.vocab_size)
        for row in features.rows:
            counts += torch.bincount(torch.from_numpy(row.input_ids[row.loss_mask]).long(), minlength=config.vocab_size)
        ids = choose_draft_vocabulary(counts, config.draft_vocab_size)
        drafter.draft_to_target.copy_(ids)
        stages.say(
            f"      draft vocabulary: {config.draft_vocab_size} of {config.vocab_size} tokens, "
            f"{coverage(counts, ids):.2%} of the supervised text"
        )
    seen, wanted = None, drafter.start_terms(recipe.drafter)
    if wanted and checkpoint.latest(folder) is None:
        with stages.stage("fit the start", 100) as advance:
            seen = _features_of_some_rows(drafter, features, wanted, advance)
    drafter.initialise_from(target, recipe.drafter, features=seen)
    return drafter


def meet_tokenizers(recipe: Recipe, drafter: Drafter, tokenizer: Any) -> None:
    """For a drafter that has a tokenizer of its own; ConfigError if it does not fit the target's `tokenizer`."""
    start = start_folder(recipe)
    drafter.meet_tokenizers(
        tokenizer,
        None if start is None else lambda: load_tokenizer(None, str(start)),
        intersection=getattr(recipe.drafter, "vocab", "same") == "intersection",
        where="drafter.vocab: intersection",
    )


def _features_of_some_rows(drafter: Drafter, features: RowFeatures, wanted: int, advance) -> list[TargetFeatures]:
    """Rows with `wanted` terms, spread over the data, one by one."""
    terms, found = 0, []
    order = np.random.default_rng(0).permutation(len(features.rows))
    for index in order.tolist():
        found.append(features.of([index]))
        terms += int(drafter.count_terms(found[-1], 1)[0])
        advance(min(round(100 * terms / wanted, 1), 100.0))
        if terms >= wanted:
            break
    return found


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
            drafter.prepare_training(part.drafter)
            share_out(accelerator, target, recipe.target.sharding)
            trained = sum(p.numel() for p in drafter.trainable_parameters())
            stages.say(
                f"      {recipe.family}: {trained / 1e6:.2f} M trainable parameters on a target of "
                f"{sum(p.numel() for p in target.parameters()) / 1e6:.1f} M"
                + (f"; taps {list(config.tap_layers)}" if config.tap_layers else "")
            )
        before = _fingerprint(part, data.target_hash, before)
        joint = JointTarget(target, part.joint) if part.joint else None
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


def _fingerprint(recipe: Recipe, target_hash: str, before: str) -> str:
    """Of everything that shapes a stage's training: its sections, the target, and the stage before."""
    names = {"family", "target", "drafter", "data", "regenerate", "loss", "joint", "training"}
    if recipe.on_policy is not None:  # runs without it are what they were before there was such a section
        names.add("on_policy")
    left_out = {"regenerate": recipe.regenerate.not_in_fingerprint()}
    sections = recipe.model_dump(mode="json", include=names, exclude=left_out)
    del sections["training"]["activation_checkpointing"], sections["target"]["sharding"]  # how, and not what
    if recipe.training.global_batch_size is None:  # likewise
        del sections["training"]["global_batch_size"]
    parts = [sections, target_hash, before]
    if recipe.features.mode == "cache":
        parts += [recipe.features.engine, *recipe.features.encodings]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def held_out_evaluation(recipe: Recipe, target: FrozenTarget, held_out: dict[float, list[Response]]):
    """Expected acceptance length (exact replay) on texts the target wrote, per temperature, and their mean."""

    def evaluate(drafter: Drafter) -> dict[str, float]:
        figures = {}
        for temperature, responses in held_out.items():
            results = expected_acceptance(
                target,
                drafter,
                [(list(r.prompt_ids), list(r.output_ids)) for r in responses],
                temperature,
                recipe.evaluation.num_speculative_tokens,
            )
            figures[f"expected_acceptance_length_t{temperature:g}"] = sum(
                results, ReplayResult()
            ).expected_acceptance_length
        figures["expected_acceptance_length"] = sum(figures.values()) / len(figures)
        return figures

    return evaluate


def export(recipe: Recipe, trained: Trained) -> Path:
    """`<output_dir>/export`, in the target's dtype unless the recipe names one, further formats beside it; the target
    too if it was trained along."""
    drafter, state, out = trained.drafter, trained.state, Path(recipe.output_dir)
    dtype = drafter.target.dtype if recipe.export.dtype == "auto" else getattr(torch, recipe.export.dtype)
    template = conversation_tokenizer(recipe.data, trained.tokenizer).template_facts()
    provenance = recipe.provenance(state.best_step or state.step) | template | summary(out)
    if trained.joint is not None:
        texts = [(r.prompt_ids, r.output_ids) for responses in trained.held_out.values() for r in responses]
        before, after = trained.joint.held_out_loss(texts)
        change = {"before": before, "after": after, "responses": len(texts)}
        trained.joint.export(out / TARGET, trained.tokenizer, change)
        provenance["target"] = describe_target(drafter.target) | {"name_or_path": str(out / TARGET)}
    return write_formats(recipe, drafter, dtype=dtype, provenance=provenance)
