"""The drafter that a run trains, with its initial weights; the same for every family."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftsmith.inference.entrypoints.loading import load_own_tokenizer
from draftsmith.inference.progress import Stages
from draftsmith.speculators.config import DrafterConfig
from draftsmith.speculators.drafter import Drafter
from draftsmith.speculators.export import load_drafter, load_weights, read_drafter_config
from draftsmith.speculators.registry import family_class
from draftsmith.speculators.target.frozen_target import TargetFeatures
from draftsmith.speculators.target.longrope import fix_frequencies, trained_length
from draftsmith.speculators.target.target_head import TargetHead
from draftsmith.speculators.vocab.draft_vocab import choose_draft_vocabulary, coverage
from draftsmith.train.features.row_features import RowFeatures
from draftsmith.train.recipe.drafter_config import start_folder
from draftsmith.train.recipe.recipe import Recipe
from draftsmith.train.trainer.seeding import seeded

COUNTED_AT_ONCE = 1024  # rows


def make_drafter(
    recipe: Recipe,
    config: DrafterConfig,
    target: TargetHead,
    features: RowFeatures,
    stages: Stages,
    *,
    resumes: bool = False,
) -> Drafter:
    """A drafter ready to train, on the target's device: draft vocabulary chosen from the supervised
    tokens, weights loaded or initialised (but not fitted where a checkpoint will replace them:
    `resumes`, on which all processes agree). The recipe's seed decides."""
    counts = supervised_counts(features.rows, target.vocab_size)
    with seeded(recipe.training.seed, target.device):
        drafter = _initialised(recipe, config, target, features, counts, stages, resumes)
        drafter.token_counts = counts
        return drafter.prepare_training(recipe.drafter)


def _initialised(
    recipe: Recipe,
    config: DrafterConfig,
    target: TargetHead,
    features: RowFeatures,
    counts: Tensor,
    stages: Stages,
    resumes: bool,
) -> Drafter:
    if (start := start_folder(recipe)) is not None:
        return _continued(recipe, config, target, start, counts, stages)
    drafter = blank_drafter(recipe, config, target)
    if config.reduced_vocabulary:
        assert drafter.draft_to_target is not None  # the vocabulary is reduced
        drafter.draft_to_target.copy_(_most_frequent(config, counts, stages))
    terms = drafter.start_terms(recipe.drafter)
    if not terms or resumes:
        drafter.initialise_from(target, recipe.drafter)
        return drafter
    with stages.stage("fit the start", 1) as advance:
        sample = _sample_features(drafter, features, terms, advance)
        drafter.initialise_from(target, recipe.drafter, features=sample)
    return drafter


def blank_drafter(recipe: Recipe, config: DrafterConfig, target: TargetHead) -> Drafter:
    """A drafter attached to the target, on its device, without starting weights."""
    drafter = family_class(config.family)(config).attach(target).to(target.device)
    if (length := trained_length(target.config, recipe.data.max_length)) is not None:
        fix_frequencies(drafter, length)
    return drafter


def _continued(
    recipe: Recipe,
    config: DrafterConfig,
    target: TargetHead,
    start: Path,
    counts: Tensor,
    stages: Stages,
) -> Drafter:
    """With the weights of the folder `start`, reduced to the vocabulary of `config`."""
    head = read_drafter_config(start, target.num_layers)
    if head.family != config.family:  # the modules that both have; the others start as they would
        drafter = blank_drafter(recipe, config, target)
        drafter.initialise_from(target)
        drafter.load_state_dict(load_drafter(start, target).state_dict(), strict=False)
        return drafter
    as_read = config.model_copy(update={"draft_vocab_size": head.draft_vocab_size})
    drafter = blank_drafter(recipe, as_read, target)
    load_weights(drafter, start)
    if config.draft_vocab_size < head.draft_vocab_size:
        drafter.reduce_vocabulary(_most_frequent(config, counts, stages).to(target.device))
    return drafter


def _most_frequent(config: DrafterConfig, counts: Tensor, stages: Stages) -> Tensor:
    """[V_draft] ids of the tokens in `counts` [V] that a reduced vocabulary has."""
    counts = counts[: config.vocab_size]  # a draft model's own table may be shorter
    ids = choose_draft_vocabulary(counts, config.draft_vocab_size)
    stages.say(
        f"      draft vocabulary: {config.draft_vocab_size} of {config.vocab_size} tokens, "
        f"{coverage(counts, ids):.2%} of the supervised text"
    )
    return ids


def supervised_counts(rows: Sequence[Any], vocab_size: int, *, every: int = 1) -> Tensor:
    """How often each token is supervised in these rows [V], or in each `every`-th of them."""
    counts = torch.zeros(vocab_size, dtype=torch.long)
    places = range(0, len(rows), every)
    for first in range(0, len(places), COUNTED_AT_ONCE):
        several = (rows[i] for i in places[first : first + COUNTED_AT_ONCE])
        ids = np.concatenate([row.input_ids[row.loss_mask] for row in several])
        counts += torch.bincount(torch.from_numpy(ids).long(), minlength=vocab_size)
    return counts


def meet_tokenizers(recipe: Recipe, drafter: Drafter, tokenizer: Any) -> None:
    """Maps the tokenizer of a drafter that has its own; ConfigError: the two do not fit."""
    start = start_folder(recipe)
    drafter.meet_tokenizers(
        tokenizer,
        None if start is None else lambda: load_own_tokenizer(str(start)),
        intersection=getattr(recipe.drafter, "vocab", "same") == "intersection",
        where="drafter.vocab: intersection",
    )


def _sample_features(
    drafter: Drafter, features: RowFeatures, requested: int, advance
) -> list[TargetFeatures]:
    terms = 0
    sample = []
    for index in np.random.default_rng(0).permutation(len(features.rows)).tolist():
        sample.append(features.of([index]))
        terms += int(drafter.count_terms(sample[-1], 1)[0])
        advance(terms / requested)
        if terms >= requested:
            break
    return sample
