"""What an LLM is made of: target, drafter, proposer, tokenizer, limits. Loading only; no prompts and no rounds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoTokenizer, PreTrainedModel

from inference.proposers.base import Proposer
from inference.proposers.head import HeadProposer
from inference.proposers.ngram import NgramProposer
from inference.speculative_config import SpeculativeConfig
from speculators.errors import CheckpointError, ConfigError
from speculators.target import FrozenTarget

if TYPE_CHECKING:
    from speculators.drafter import Drafter


def load_target(
    model: str | FrozenTarget | PreTrainedModel, config: SpeculativeConfig, *, tap_layers: Sequence[int] = (),
    **options: Any,
) -> tuple[FrozenTarget, Drafter | None]:
    """The target, and the drafter if the method has one. The target taps the layers that the drafter's own
    configuration names. A target that is already loaded is used as it is (its taps are looked up anew)."""
    from speculators.export import load_drafter, read_drafter_config

    drafter_config = None
    if isinstance(model, FrozenTarget):
        model = model.model
    if config.trained:
        if isinstance(model, PreTrainedModel):
            num_layers = getattr(model.config.get_text_config(), "num_hidden_layers", None)
            drafter_config = read_drafter_config(config.model, num_layers)
        else:
            try:
                drafter_config = read_drafter_config(config.model)
            except ConfigError:
                drafter_config = None
        tap_layers = drafter_config.tap_layers if drafter_config is not None else ()
    if isinstance(model, PreTrainedModel):
        target = FrozenTarget(model, tap_layers)
    else:
        target = FrozenTarget.from_pretrained(str(model), tap_layers=tap_layers, **options)
    if not config.trained:
        return target, None
    return target, load_drafter(config.model, target)
