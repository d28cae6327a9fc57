"""Small language models as drafters: which one is built, and how one is cut out of its target.

A model is described by the plain fields of its config.json, so that a drafter's configuration says
all there is to know. A cut student keeps the target's embedding, norm and head and some of its
layers, in their order; every field of the configuration that holds one value per layer is cut with
them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from draftsmith.speculators.errors import ConfigError
from draftsmith.speculators.hub import one_line
from draftsmith.speculators.target.checkpoint_tensors import Checkpoint, read_tensors
from draftsmith.speculators.target.probe import needs_eager, refuse_incomplete
from draftsmith.speculators.target.target_head import TargetHead

# Fields that say nothing of the weights, and differ between a model, its folder and an export.
_ELSEWHERE = {"_name_or_path", "architectures", "dtype", "torch_dtype", "draftsmith"}
_ELSEWHERE |= {"transformers_version"}
# Fields that say how many layers, from the first on, are of one kind.
_LEADING_LAYERS = {"max_window_layers", "first_k_dense_replace"}
# What transformers raises for fields that it cannot build a configuration from.
_BUILD_ERRORS = (TypeError, ValueError, KeyError, AttributeError, StrictDataclassError)


def plain_fields(
    config: PretrainedConfig | Mapping[str, Any], where: str = "model"
) -> dict[str, Any]:
    """A causal LM's configuration as plain JSON: the same for the model, its folder and its export.

    ConfigError for what transformers does not know, or what is no plain causal LM.
    """
    if isinstance(config, Mapping):
        fields = {name: value for name, value in config.items() if name not in _ELSEWHERE}
        try:
            config = AutoConfig.for_model(**fields)
        except _BUILD_ERRORS as error:
            raise ConfigError(
                f"transformers builds no model of {fields.get('model_type')!r}: {one_line(error)}",
                where=where,
            ) from error
    if config.get_text_config() is not config:
        raise ConfigError(
            f"{config.model_type!r} has a text model inside a larger one; a draft model is"
            " a plain causal LM: give the text model's own checkpoint",
            where=where,
        )
    fields = {name: value for name, value in config.to_dict().items() if name not in _ELSEWHERE}
    if fields.pop("quantization_config", None):
        raise ConfigError(
            f"{config.model_type!r} is quantised; a draft model is trained, give plain weights",
            where=where,
        )
    return fields


def config_of(fields: Mapping[str, Any]) -> PretrainedConfig:
    """transformers' own object of `plain_fields`, which answers to the usual names."""
    return AutoConfig.for_model(**fields)


def build_model(fields: Mapping[str, Any]) -> PreTrainedModel:
    """The causal LM of `plain_fields`, in float32, as transformers initialises it."""
    config = config_of(fields)
    attention = "eager" if needs_eager(config) else None  # None: transformers' choice
    try:
        model = AutoModelForCausalLM.from_config(
            config, attn_implementation=attention, dtype=torch.float32
        )
    except ValueError as error:
        raise ConfigError(
            f"transformers builds no causal LM of {config.model_type!r}: {error}",
            where="draft model",
        ) from error
    model.tie_weights()
    return model


def cut_layers(kept: Sequence[int] | Mapping[str, int], total: int, where: str) -> list[int]:
    """Which of a target's `total` layers a student keeps: a list of them, or {first|last|spread:
    how many}.

    spread: evenly from the first to the last. ConfigError for layers that there are not.
    """
    if isinstance(kept, Mapping):
        ((how, count),) = kept.items()
        if not 1 <= count <= total:
            raise ConfigError(f"{how}: {count}; the target has {total} layers", where=where)
        if how == "spread":
            return [round(i * (total - 1) / max(count - 1, 1)) for i in range(count)]
        return list(range(count)) if how == "first" else list(range(total - count, total))
    if list(kept) != sorted(set(kept)) or not all(0 <= layer < total for layer in kept):
        raise ConfigError(
            f"{list(kept)}: expected rising numbers of the target's layers 0..{total - 1}",
            where=where,
        )
    return list(kept)


def cut_fields(target: PretrainedConfig, layers: Sequence[int], where: str) -> dict[str, Any]:
    """`plain_fields` of a model like `target` that keeps some of its layers."""
    fields = plain_fields(deepcopy(target), where)
    total = target.num_hidden_layers
    names = target.attribute_map  # an architecture may have names of its own for the usual fields
    for name, value in fields.items():
        if isinstance(value, list) and len(value) == total and not name.endswith("_token_id"):
            fields[name] = [value[layer] for layer in layers]
    for name in _LEADING_LAYERS & fields.keys():
        fields[name] = sum(layer < fields[name] for layer in layers)
    fields[names.get("num_hidden_layers", "num_hidden_layers")] = len(layers)
    return plain_fields(fields, where)


@torch.no_grad()
def copy_layers(source: PreTrainedModel, layers: Sequence[int], student: PreTrainedModel) -> None:
    """Fills `student` with the weights of `source`, its i-th layer with those of `source`'s
    layers[i].

    ConfigError names every tensor that the two do not share.
    """
    prefix = layers_name(source)
    places = {layer: place for place, layer in enumerate(layers)}
    renamed: dict[str, Tensor] = {}
    for name, tensor in source.state_dict().items():
        if name.startswith(prefix):
            number, _, rest = name[len(prefix) :].partition(".")
            if int(number) not in places:
                continue
            name = f"{prefix}{places[int(number)]}.{rest}"
        renamed[name] = tensor
    state = student.state_dict()
    faults = sorted(state.keys() ^ renamed.keys())
    shared = state.keys() & renamed.keys()
    faults += [name for name in shared if state[name].shape != renamed[name].shape]
    if faults:
        raise ConfigError(
            f"a student cut from a {source.config.model_type} target does not share"
            f" {len(faults)} of its tensors, such as {', '.join(faults[:3])}; start from a model"
            " with drafter.init_from",
            where="draft model",
        )
    for name, tensor in state.items():
        tensor.copy_(renamed[name])
    student.generation_config = deepcopy(source.generation_config)  # what ends a text


@torch.no_grad()
def read_layers(
    checkpoint: Checkpoint, target: TargetHead, layers: Sequence[int], student: PreTrainedModel
) -> None:
    """As `copy_layers`, from the files of a target that is not loaded, in the precision that it
    would be loaded in. Only the files that hold these layers are opened.

    CheckpointError names tensors of the student that the files lack."""
    weights = read_tensors(checkpoint, student, target.name_or_path, layers)
    model, info = type(student).from_pretrained(
        None,
        config=student.config,
        state_dict=weights,
        dtype=target.dtype,
        ignore_mismatched_sizes=True,  # refused below, by name
        output_loading_info=True,
    )
    refuse_incomplete(info, target.name_or_path)
    student.load_state_dict(model.state_dict())
    student.generation_config = deepcopy(target.model.generation_config)


def layers_name(model: nn.Module) -> str:
    """The prefix of the tensors of a model's decoder layers, such as `model.layers.`."""
    from draftsmith.speculators.target.probe import find_parts

    layers = find_parts(model).layers
    return next(name for name, module in model.named_modules() if module is layers) + "."
