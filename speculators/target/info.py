"""What config.json alone says of a target: the class that loads it, and its sizes, before any
weight is loaded.

A TargetSketch stands in for a FrozenTarget where only sizes are read
(`draftsmith.speculators.registry.config_for_target`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    PretrainedConfig,
    PreTrainedModel,
)

from draftsmith.speculators.errors import CheckpointError, UnsupportedTarget
from draftsmith.speculators.hub import why_not_loaded
from draftsmith.speculators.precision import as_dtype, own_device, running_dtype
from draftsmith.speculators.target.adapted import config_source


@dataclass(frozen=True)
class TargetSketch:
    """Sizes of a target, under FrozenTarget's names."""

    name_or_path: str
    config: PretrainedConfig  # of the text model
    hidden_size: int
    vocab_size: int
    num_layers: int
    dtype: torch.dtype  # it runs in
    checkpoint_dtype: torch.dtype
    num_parameters: int  # tied ones counted once
    model: PreTrainedModel  # on the meta device, in float32


def auto_class(config: PretrainedConfig) -> Any:
    """transformers' class of a causal LM, or of a multimodal model around one."""
    kind = type(config)
    if kind in MODEL_FOR_MULTIMODAL_LM_MAPPING and kind not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return AutoModelForMultimodalLM
    return AutoModelForCausalLM


def auto_class_of(model: str, **source: Any) -> Any:
    """The same, of a folder or repository. `source`: revision, trust_remote_code."""
    try:
        return auto_class(AutoConfig.from_pretrained(model, **source))
    except (OSError, ValueError, KeyError):
        # which says what is wrong, and reads folders of a peft adapter alone
        return AutoModelForCausalLM


def sketch_target(
    model: str,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    dtype: str = "auto",
    device: torch.device | str | None = None,
) -> TargetSketch:
    """Reads config.json (of a folder, the local cache or the hub); builds the model without memory
    for weights.

    `dtype`: as in the recipe's `target.dtype`. `device`: what it is to run on; None: what this
    machine would use."""
    whole = _read_config(model, revision, trust_remote_code)
    config = whole.get_text_config()
    try:
        with torch.device("meta"):
            module = auto_class(whole).from_config(whole, trust_remote_code=trust_remote_code)
    except (ValueError, KeyError, ImportError) as error:
        raise UnsupportedTarget(
            f"transformers cannot build it: {error}", where=f"target {model}"
        ) from error
    head = module.get_output_embeddings()
    stored = as_dtype(
        getattr(whole, "dtype", None) or getattr(config, "dtype", None) or torch.float32
    )
    running = running_dtype(dtype, stored, device or own_device())
    return TargetSketch(
        name_or_path=model,
        config=config,
        hidden_size=config.hidden_size,
        vocab_size=head.weight.shape[0] if head is not None else config.vocab_size,
        num_layers=config.num_hidden_layers,
        dtype=running,
        checkpoint_dtype=stored if dtype == "auto" else running,
        num_parameters=sum(p.numel() for p in module.parameters()),
        model=module,
    )


def _read_config(model: str, revision: str | None, trust_remote_code: bool) -> Any:
    """The config.json of a target, of an adapter's folder that of the model it adapts.
    CheckpointError: there is none."""
    model, revision = config_source(model, revision)
    try:
        return AutoConfig.from_pretrained(
            model, revision=revision, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{model} has no config.json that transformers can read"
            f" ({why_not_loaded(model, error)}); give a folder that holds a causal language model,"
            " or a repository id",
            where="target.model",
        ) from error
