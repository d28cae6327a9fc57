"""Chooses the size of a draft vocabulary before the training, where a recipe says `auto`.

What drafts cost at each size is measured (inference/evaluation/vocabulary_curve.py). What they gain
cannot be, as there is no drafter yet; it is modelled. A draft is accepted only if the target's
token is in the vocabulary, which holds for the share c of the text, its coverage; if it is, with
the probability a = ASSUMED_ACCEPTANCE. With all drafts alike and independent, k in a row are
accepted with probability (a c)^k, so that a round of K drafts writes τ = Σ_{k=0..K} (a c)^k tokens.
Tokens that a vocabulary lacks are rare ones, which a drafter seldom finds: the model overrates
their loss, and errs towards large vocabularies."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from draftsmith.inference.evaluation.vocabulary_curve import (
    VocabularySize,
    curve_table,
    fastest,
    measure_prices,
    sizes_to_try,
)
from draftsmith.inference.progress import Stages
from draftsmith.inference.whole_file import write_whole
from draftsmith.speculators.config import DrafterConfig
from draftsmith.speculators.drafter import Drafter
from draftsmith.speculators.errors import CheckpointError, DataError
from draftsmith.speculators.options import AUTO
from draftsmith.speculators.target.frozen_target import FrozenTarget
from draftsmith.speculators.vocab.draft_vocab import choose_draft_vocabulary, coverage
from draftsmith.train.pipeline.adapted_target import with_adapted_target
from draftsmith.train.pipeline.data_stage import DataStage
from draftsmith.train.pipeline.drafter_stage import blank_drafter, supervised_counts
from draftsmith.train.pipeline.run_target import load_target
from draftsmith.train.processes import on_first
from draftsmith.train.recipe.drafter_config import drafter_config, sketch_drafter
from draftsmith.train.recipe.recipe import Recipe
from draftsmith.train.trainer.seeding import seeded

SIZE = "draft_vocab_size"
WHERE = f"drafter.{SIZE}"
ASSUMED_ACCEPTANCE = 0.7  # of a draft whose token is in the vocabulary
HELD_OUT_EVERY = 5  # one row of so many judges what the others have chosen


def with_draft_vocabulary(recipe: Recipe, accelerator: Accelerator, stages: Stages) -> Recipe:
    """The recipe with a number of tokens in place of `auto`, the same in all processes. A run
    measures it once: it is kept in its folder, and a run that goes on reads it there.

    ConfigError if no size can be chosen for this drafter, DataError without text to judge by."""
    if getattr(recipe.drafter, SIZE, None) != AUTO:
        return recipe
    file = choice_file(recipe)
    size = on_first(accelerator, lambda: _read(file))
    if size is None:
        size = _choose(with_adapted_target(recipe, accelerator), file, accelerator, stages)
    stages.say(f"      draft vocabulary: {size:,} tokens, by measurement ({file})")
    return sized(recipe, size)


def choice_file(recipe: Recipe) -> Path:
    """Where a run keeps its choice, under a hash of the sections that it depends on: another recipe
    in the same folder has another choice and leaves this one."""
    names = ("family", "target", "drafter", "data", "regenerate")
    tree = recipe.model_dump(mode="json")
    parts = [{name: tree[name] for name in names}, tree["evaluation"]["num_speculative_tokens"]]
    digest = hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=6)
    return Path(recipe.output_dir) / f"draft_vocab_size-{digest.hexdigest()}.json"


def sized(recipe: Recipe, size: int) -> Recipe:
    """The recipe with a draft vocabulary of `size` tokens."""
    drafter = recipe.drafter.model_copy(update={SIZE: size})
    return recipe.model_copy(update={"drafter": drafter})


def assumed_length(share: float, k: int) -> float:
    """τ of K drafts at this coverage, as derived above."""
    return sum((ASSUMED_ACCEPTANCE * share) ** drafts for drafts in range(k + 1))


def coverages(rows: Sequence[Any], vocab_size: int, sizes: Sequence[int]) -> dict[int, float]:
    """By size, the share of held-out supervised tokens that is among those supervised most often in
    the other rows. DataError: there are no two rows with supervised tokens."""
    held_out = supervised_counts(rows, vocab_size, every=HELD_OUT_EVERY)
    others = supervised_counts(rows, vocab_size) - held_out
    if not others.sum():
        raise DataError(
            f"auto judges by one row in {HELD_OUT_EVERY}, and there are {len(rows)}; expected two"
            " or more, or a number of tokens",
            where=WHERE,
        )
    return {size: coverage(held_out, choose_draft_vocabulary(others, size)) for size in sizes}


def _read(file: Path) -> int | None:
    """The choice of an earlier start; None: there is none. CheckpointError: it cannot be read."""
    if not file.exists():
        return None
    try:
        return int(json.loads(file.read_text(encoding="utf-8"))[SIZE])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(
            f"holds no {SIZE} ({error}); give its number as {WHERE}, or delete it to measure again",
            where=f"{file}",
        ) from error


def _choose(recipe: Recipe, file: Path, accelerator: Accelerator, stages: Stages) -> int:
    """Measures every size and writes the curve to `file`. All processes come here together; the
    first one measures."""
    sketch = recipe.target.sketch(accelerator.device)
    config = drafter_config(recipe, sketch)
    sketch_drafter(recipe, config)
    sizes = sizes_to_try(min(config.vocab_size, sketch.vocab_size))
    for size in sizes:  # what a choice would be refused for
        drafter_config(sized(recipe, size), sketch)
    name, part = recipe.training_stages()[0]
    target = load_target(recipe, accelerator, config.tap_layers, stages)
    tokenizer = recipe.target.load_tokenizer()
    rows = DataStage(part, target, tokenizer, accelerator, stages, stage=name).training_rows()
    shares = coverages(rows, config.vocab_size, sizes)

    def choice() -> int:
        with stages.stage("measure draft vocabularies"):
            curve = _curve(recipe, config, target, shares)
        stages.console.print(curve_table(curve, f"{recipe.family}: draft vocabularies"))
        size = fastest(curve).size
        points = [point.record() for point in curve]
        tree = {SIZE: size, "assumed_acceptance": ASSUMED_ACCEPTANCE, "curve": points}
        write_whole(file, json.dumps(tree, indent=2) + "\n")
        return size

    return on_first(accelerator, choice)


def _curve(
    recipe: Recipe, config: DrafterConfig, target: FrozenTarget, shares: dict[int, float]
) -> list[VocabularySize]:
    """A point for each size: the time of drafters without trained weights, one text at a time."""
    k = recipe.evaluation.num_speculative_tokens

    def drafters() -> Iterator[Drafter]:
        for size in shares:
            reduced = config.model_copy(update={SIZE: size})
            yield blank_drafter(recipe, reduced, target).to(target.dtype).freeze()

    with seeded(recipe.training.seed, target.device):
        prices = measure_prices(drafters, target, k, rows=1)
    return [
        VocabularySize(size, share, assumed_length(share, k), prices[size])
        for size, share in shares.items()
    ]
