"""The facts about a recipe before any weight is loaded: shapes and parameters, exact, from the
configuration alone; tokens and steps, from a sample of the data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from speculators.config import DrafterConfig
from speculators.drafter import Drafter
from speculators.precision import autocast_dtype, own_device
from speculators.target.info import TargetSketch
from train.features.encodings import bytes_per_token
from train.losses.chunked import default_chunk_size
from train.planner.token_counts import TokenCount, counter
from train.recipe.recipe import Recipe
from train.trainer.batches import StepRows


@dataclass
class Outline:
    """The facts about a recipe, or about one stage of it."""

    recipe: Recipe
    target: TargetSketch
    drafter: DrafterConfig
    head: Drafter  # without memory for its weights
    sources: list[TokenCount] = field(default_factory=list)
    validation: list[TokenCount] = field(default_factory=list)
    device: torch.device = field(default_factory=own_device)  # that it is to run on

    @property
    def autocast(self) -> torch.dtype:
        """The dtype that the head's layers compute in."""
        return autocast_dtype(self.recipe.training.mixed_precision, self.device)

    @property
    def trainable(self) -> int:
        return sum(p.numel() for p in self.head.trainable_parameters())

    @property
    def parameters(self) -> int:
        """Parameters of the drafter, trained or not."""
        return sum(p.numel() for p in self.head.parameters())

    @property
    def feature_bytes(self) -> int:
        """Bytes per token of the taps and the last hidden state, in the target's dtype."""
        return (
            (len(self.drafter.tap_layers) + 1)
            * self.target.hidden_size
            * self.target.dtype.itemsize
        )

    @property
    def cached_bytes(self) -> int:
        """Bytes per token on disk, with features.mode: cache."""
        t = self.target
        return bytes_per_token(
            self.recipe.features.encoding, len(self.drafter.tap_layers), t.hidden_size, t.dtype
        )

    @property
    def depths(self) -> int:
        """Depths of an unroll."""
        return min(
            self.recipe.drafter.unroll_steps,
            self.head.max_depth or self.recipe.drafter.unroll_steps,
        )

    @property
    def chunk_size(self) -> int:
        """Rows of the objective whose logits exist at once."""
        vocabulary = max(self.target.vocab_size, self.drafter.draft_vocab_size)
        return default_chunk_size(vocabulary, self.device)

    @property
    def tokens(self) -> int:
        return sum(source.tokens for source in self.sources)

    @property
    def supervised(self) -> int:
        return sum(source.supervised for source in self.sources)

    def step_rows(self, processes: int = 1) -> StepRows:
        """The rows and micro-steps of an optimizer step on each process."""
        return StepRows(self.recipe.training, processes=processes)

    def steps(self, processes: int = 1) -> int | None:
        """Optimizer steps; None: the budget is minutes, or epochs of data that nobody counted."""
        t = self.recipe.training
        if t.steps is not None:
            return t.steps
        if t.epochs is None or not self.tokens:
            return None
        rows = self.tokens / self.recipe.data.max_length  # packed rows are nearly full
        return math.ceil(rows * t.epochs / self.step_rows(processes).rows_per_step)


def outline(
    recipe: Recipe,
    counted: tuple[Sequence[TokenCount], Sequence[TokenCount]] | None = None,
    device: torch.device | str | None = None,
) -> Outline:
    """Reads the target's config and tokenizer and a sample of local data; hub datasets are not
    touched.

    `counted`: the token counts of `data.train` and of `data.validation`, where they are known.
    `device`: the device of the run, by default this machine's."""
    from train.recipe.drafter_config import drafter_config, sketch_drafter

    device = own_device() if device is None else torch.device(device)
    target = recipe.target.sketch(device)
    config = drafter_config(recipe, target, planning=True)
    head = sketch_drafter(recipe, config).prepare_training(recipe.drafter)
    if counted is None:
        count = counter(recipe)
        data = recipe.data
        counted = (
            [count(s) for s in data.train],
            [count(s) for s in data.validation],
        )
    return Outline(recipe, target, head.config, head, list(counted[0]), list(counted[1]), device)
