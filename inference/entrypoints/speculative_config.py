"""speculative_config: the options of all methods under vLLM's names, distinguished by `method`."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError
from transformers import PreTrainedModel

from draftsmith.inference.entrypoints.loading import loaded, target_config
from draftsmith.inference.spec_decode.proposers.methods import (
    TRAINING_FREE,
    beside_heads,
    method_options,
    option_names,
    owners,
)
from draftsmith.inference.spec_decode.proposers.options import MethodOptions
from draftsmith.speculators.config import DrafterConfig
from draftsmith.speculators.errors import ConfigError
from draftsmith.speculators.export import read_drafter_config, read_fields
from draftsmith.speculators.export.layouts.base import NUM_SPECULATIVE_TOKENS
from draftsmith.speculators.hub import with_revision
from draftsmith.speculators.target.frozen_target import FrozenTarget

logger = logging.getLogger(__name__)


def parse_speculative_config(options: Mapping[str, Any] | None) -> MethodOptions:
    """The checked options; ConfigError names every one that is wrong or unknown. None is drafting
    off."""
    if options is None:
        return MethodOptions()
    if "method" not in options:
        raise ConfigError(
            "method is missing: name one, or the model of a drafter, whose config.json says it",
            where="speculative_config",
        )
    kind = MethodOptions
    method = options["method"]
    try:
        if isinstance(method, str):
            kind = method_options(method)
    except ConfigError as error:
        raise ConfigError(f"{error}", where="speculative_config") from None
    if kind.trained and options.get("with") is not None:
        options = _with_method_beside(options)
    return _validated(kind, options)


def _with_method_beside(options: Mapping[str, Any]) -> dict[str, Any]:
    """`options` of a head, in which `with` is the checked options of the method that drafts beside
    it, taken out of them. ConfigError for what is no such method."""
    name = options["with"]
    if name not in (known := beside_heads()):
        raise ConfigError(
            f"with: {name!r}; expected {' or '.join(known)}, whose drafts need no model",
            where="speculative_config",
        )
    kind = method_options(name)
    of_kind = set(kind.model_fields) - set(MethodOptions.model_fields)
    beside = {key: value for key, value in options.items() if key in of_kind}
    tokens = {"num_speculative_tokens": options.get("num_speculative_tokens")}
    head = {key: value for key, value in options.items() if key not in of_kind}
    return head | {"with": _validated(kind, {"method": name, **tokens, **beside})}


def _validated(kind: type[MethodOptions], options: Mapping[str, Any]) -> MethodOptions:
    try:
        return kind.model_validate(options)
    except ConfigError as error:
        raise ConfigError(f"{error}", where="speculative_config") from None
    except ValidationError as error:
        raise ConfigError(faults_of(error, kind), where="speculative_config") from error


def faults_of(error: ValidationError, model: type[BaseModel]) -> str:
    """What is wrong with options of `model`, each named with its value, and which there are."""
    faults = []
    for fault in error.errors():
        name = ".".join(map(str, fault["loc"]))
        message = fault["msg"].removeprefix("Value error, ")
        if fault["type"] == "missing":
            message = f"{name} is missing: {model.model_fields[str(fault['loc'][0])].description}"
        elif fault["type"] != "extra_forbidden":
            message = f"{name}={fault['input']!r}: {message}" if name else message
        elif known := owners(name):
            methods = " and ".join(known) if len(known) < 3 else "trained drafters"
            message = f"{name} belongs to {methods}"
        else:
            message = f"{name}: unknown option"
        faults.append(message)
    return f"{'; '.join(faults)} (options: {', '.join(option_names(model))})"


def complete(
    options: Mapping[str, Any] | None, model: str | FrozenTarget | PreTrainedModel, **source: Any
) -> Mapping[str, Any] | None:
    """`options` with `method` and `num_speculative_tokens`, of a tree that grows also its levels,
    filled in from the drafter's folder: config.json and the names of the tensors say which family
    it holds, never a path. `model`: the target; `source`: its revision and trust_remote_code.
    CheckpointError for a folder that holds no drafter."""
    if options is None or options.get("method") in [*TRAINING_FREE]:
        return options
    filled = dict(options)
    if filled.get("method") == "mtp" and filled.get("model") is None and not loaded(model):
        # a module that the target came with
        filled["model"] = with_revision(str(model), source.get("revision"))
    drafter = filled.get("model")
    tokens = filled.get("num_speculative_tokens")
    if not isinstance(drafter, str) or ("method" in filled and tokens is not None):
        return filled
    config = read_drafter_config(drafter, target_config(model, **source).num_hidden_layers)
    filled.setdefault("method", config.family)
    if filled["method"] is None or tokens is not None:
        return filled
    if filled.get("speculative_token_tree") is None:
        filled |= _sizes(filled, drafter, config)
    return filled


def _sizes(options: Mapping[str, Any], drafter: str, config: DrafterConfig) -> dict[str, int]:
    """`sizes_of`, with as many tokens in a row as the drafter's folder says or as is usual for its
    family."""
    topk = options.get("speculative_eagle_topk")
    steps = options.get("speculative_num_steps")
    if isinstance(topk, int) and isinstance(steps, int):
        return sizes_of(options, steps)
    section = read_fields(drafter).get("draftsmith") or {}
    length = section.get("num_speculative_tokens") or config.usual_drafts
    if not length:
        length = NUM_SPECULATIVE_TOKENS
        logger.warning(
            "speculative_config: num_speculative_tokens is not given, nor in config.json of %s; %d"
            " are drafted in a row",
            drafter,
            length,
        )
    return sizes_of(options, length)


def sizes_of(options: Mapping[str, Any], length: int) -> dict[str, int]:
    """The sizes that `options` of a method leave out, where `length` tokens are drafted in a row: K
    of a chain; of a tree that grows its levels, and `speculative_eagle_topk` nodes for each. None
    where a number of tokens or a fixed tree is among the options."""
    if options.get("num_speculative_tokens") is not None:
        return {}
    if options.get("speculative_token_tree") is not None:
        return {}
    topk = options.get("speculative_eagle_topk")
    if not isinstance(topk, int):
        return {"num_speculative_tokens": length}
    steps = options.get("speculative_num_steps")
    if not isinstance(steps, int):
        steps = length
    return {"num_speculative_tokens": topk * steps, "speculative_num_steps": steps}
