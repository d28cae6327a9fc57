"""Defaults of a speculative_config, read from the drafter that it names: its method, and how many
tokens to draft.

Nothing is guessed from a path: config.json and the names of the tensors say which family a folder
holds. Reads no weights and loads no model."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedModel

from inference.entrypoints.loading import loaded, target_config
from inference.spec_decode.proposers.methods import TRAINING_FREE
from speculators.export import read_drafter_config, read_fields
from speculators.export.layouts.base import NUM_SPECULATIVE_TOKENS
from speculators.hub import with_revision
from speculators.target.frozen_target import FrozenTarget

logger = logging.getLogger(__name__)

# Family -> fields of config.json that say how many tokens the drafter was made to draft.
DEPTH_FIELDS = {
    "medusa": ("num_heads", "medusa_num_heads"),
    "mlp": ("n_predict",),
    "mtp": ("num_nextn_predict_layers",),
    "peagle": ("num_depths",),
}


def complete(options: Any, model: str | FrozenTarget | PreTrainedModel, **source: Any) -> Any:
    """`options` of speculative_config with `method` and `num_speculative_tokens` filled in where
    the drafter's folder can tell; anything that is no dict of options comes back as it is. `model`:
    the target; `source`: its revision and trust_remote_code. CheckpointError for a folder that
    holds no drafter."""
    if not isinstance(options, Mapping) or options.get("method") in [*TRAINING_FREE]:
        return options
    options = dict(options)
    if options.get("method") == "mtp" and options.get("model") is None and not loaded(model):
        options["model"] = with_revision(
            str(model), source.get("revision")
        )  # a module that the target came with
    drafter = options.get("model")
    if not isinstance(drafter, str):
        return options
    if "method" not in options:
        options["method"] = read_drafter_config(
            drafter, target_config(model, **source).num_hidden_layers
        ).family
    if options["method"] is not None and options.get("num_speculative_tokens") is None:
        options["num_speculative_tokens"] = _depth(drafter, options["method"])
    return options


def _depth(drafter: str, family: str) -> int:
    """The tokens a drafter was measured with or made for, else NUM_SPECULATIVE_TOKENS with a line
    in the log."""
    fields = read_fields(drafter)
    places = [(fields.get("draftsmith") or {}).get("num_speculative_tokens")]
    places += [fields.get(name) for name in DEPTH_FIELDS.get(family, ())]
    found = next((value for value in places if isinstance(value, int) and value > 0), None)
    if found is None:
        message = (
            "speculative_config: num_speculative_tokens is not given, nor in config.json of %s; %d"
            " are drafted"
        )
        logger.warning(message, drafter, NUM_SPECULATIVE_TOKENS)
    return found or NUM_SPECULATIVE_TOKENS
