"""Defaults of a speculative_config, read from the drafter that it names: its method, and how many
tokens to draft.

Nothing is guessed from a path: config.json and the names of the tensors say which family a folder
holds. Reads no weights and loads no model."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedModel

from draftsmith.inference.entrypoints.loading import loaded, target_config
from draftsmith.inference.spec_decode.proposers.methods import TRAINING_FREE
from draftsmith.speculators.config import DrafterConfig
from draftsmith.speculators.export import read_drafter_config, read_fields
from draftsmith.speculators.export.layouts.base import NUM_SPECULATIVE_TOKENS
from draftsmith.speculators.hub import with_revision
from draftsmith.speculators.target.frozen_target import FrozenTarget

logger = logging.getLogger(__name__)


def complete(options: Any, model: str | FrozenTarget | PreTrainedModel, **source: Any) -> Any:
    """`options` of speculative_config with `method` and `num_speculative_tokens` filled in from the
    drafter's folder; options that are not a mapping are returned unchanged. `model`: the target;
    `source`: its revision and trust_remote_code. CheckpointError for a folder that holds no
    drafter."""
    if not isinstance(options, Mapping) or options.get("method") in [*TRAINING_FREE]:
        return options
    options = dict(options)
    if options.get("method") == "mtp" and options.get("model") is None and not loaded(model):
        options["model"] = with_revision(
            str(model), source.get("revision")
        )  # a module that the target came with
    drafter, tokens = options.get("model"), options.get("num_speculative_tokens")
    if not isinstance(drafter, str) or ("method" in options and tokens is not None):
        return options
    layers = target_config(model, **source).num_hidden_layers
    config = read_drafter_config(drafter, layers)
    options.setdefault("method", config.family)
    if options["method"] is not None and tokens is None:
        options["num_speculative_tokens"] = _drafts(drafter, config)
    return options


def _drafts(drafter: str, config: DrafterConfig) -> int:
    """The tokens a drafter was measured with or made for, else NUM_SPECULATIVE_TOKENS with a line
    in the log."""
    own = (read_fields(drafter).get("draftsmith") or {}).get("num_speculative_tokens")
    if drafts := own or config.usual_drafts:
        return drafts
    message = (
        "speculative_config: num_speculative_tokens is not given, nor in config.json of %s; %d"
        " are drafted"
    )
    logger.warning(message, drafter, NUM_SPECULATIVE_TOKENS)
    return NUM_SPECULATIVE_TOKENS
