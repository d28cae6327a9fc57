"""What a recipe comes to, before any weight is loaded or a token is generated: shapes, parameters, tokens, steps.

`--dry-run` shows these facts and `draftsmith plan` computes memory, time and cost from them. Shapes and parameter
counts are exact, from the configuration alone; token counts come from a sample of the data. Of the
hardware it knows the kind of device alone, for what "auto" means there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from speculators.config import DrafterConfig
from speculators.drafter import Drafter
from speculators.precision import autocast_dtype, own_device
from speculators.target.info import TargetSketch
from train.features.encodings import bytes_per_token
from train.losses.chunked import default_chunk_size
from train.planner.token_counts import TokenCount, counter, mixed
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
    known: dict[tuple, Any] = field(default_factory=dict)  # what was computed of it (rehearsal.py)

    @property
    def autocast(self) -> torch.dtype:
        """What the head's layers compute in."""
        return autocast_dtype(self.recipe.training.mixed_precision, self.device)

    @property
    def trainable(self) -> int:
        return sum(p.numel() for p in self.head.trainable_parameters())

    @property
    def parameters(self) -> int:
        """Of the drafter, trained or not."""
        return sum(p.numel() for p in self.head.parameters())

    @property
    def feature_bytes(self) -> int:
        """Per token: the taps and the last hidden state, in the target's dtype."""
        return (len(self.drafter.tap_layers) + 1) * self.target.hidden_size * self.target.dtype.itemsize

    @property
    def cached_bytes(self) -> int:
        """Per token on disk, with features.mode: cache."""
        t = self.target
        return bytes_per_token(self.recipe.features.encodings, len(self.drafter.tap_layers), t.hidden_size, t.dtype)

    @property
    def depths(self) -> int:
        """Of an unroll."""
        return min(self.recipe.drafter.unroll_steps, self.head.max_depth or self.recipe.drafter.unroll_steps)

    @property
    def chunk_size(self) -> int:
        """Rows of the objective whose logits exist at once."""
        vocabulary = max(self.target.vocab_size, self.drafter.draft_vocab_size)
        return self.recipe.training.loss_chunk_size or default_chunk_size(vocabulary, self.device)

    @property
    def tokens(self) -> int:
        return sum(source.tokens for source in self.sources)

    @property
    def supervised(self) -> int:
        return sum(source.supervised for source in self.sources)

    @property
    def supervised_share(self) -> float:
        """Of the tokens; where none were counted all of them, which costs the most."""
        return self.supervised / self.tokens if self.tokens else 1.0

    @property
    def packed_rows(self) -> float:
        """Of `data.max_length` tokens; packed ones are nearly full."""
        if self.recipe.data.packing:
            return self.tokens / self.recipe.data.max_length
        return float(sum(source.rows for source in self.sources))

    def micro_steps(self, processes: int = 1) -> tuple[int, int]:
        """(rows of a micro-step, micro-steps of an optimizer step), on each process."""
        shared = StepRows(self.recipe.training, processes=processes)
        return shared.rows, shared.micro_steps

    def rows_per_step(self, processes: int = 1) -> int:
        return StepRows(self.recipe.training, processes=processes).rows_per_step

    def steps(self, processes: int = 1) -> int | None:
        """Optimizer steps; None: the budget is minutes, or epochs of data that nobody counted."""
        t = self.recipe.training
        if t.steps is not None:
            return t.steps
        if t.epochs is None or not self.tokens:
            return None
        return math.ceil(self.packed_rows * t.epochs / self.rows_per_step(processes))


def outline(
    recipe: Recipe,
    counted: tuple[Sequence[TokenCount], Sequence[TokenCount]] | None = None,
    device: torch.device | str | None = None,
) -> Outline:
    """All facts. Reads the target's config and tokenizer and a sample of local data; hub datasets are not touched.
    `counted`: what the sources of `data.train` and of `data.validation` hold, where that is known. `device`: what it is
    to run on, by default this machine's."""
    from train.recipe.drafter_config import drafter_config, sketch_drafter

    device = own_device() if device is None else torch.device(device)
    target = recipe.target.sketch(device)
    config = drafter_config(recipe, target, planning=True)
    head = sketch_drafter(recipe, config).prepare_training(recipe.drafter)
    if counted is None:
        count = counter(recipe)
        data = recipe.data
        counted = mixed([count(s) for s in data.train], data.train), [count(s) for s in data.validation]
    return Outline(recipe, target, head.config, head, list(counted[0]), list(counted[1]), device)
