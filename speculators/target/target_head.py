"""TargetHead: what a drafter shares of its target, which is embedding, final norm and output head.

A target of any size has these on one device. They are read from a checkpoint by its index: only
the shards that hold them are opened, and fetched from the Hub. transformers names and loads the
tensors, builds the modules, and runs them in their order with nothing in the place of the decoder
layers, so that scales and soft caps are observed as they are on a whole model. Hidden states come
from elsewhere."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

from draftsmith.speculators.errors import CheckpointError, ConfigError, UnsupportedTarget
from draftsmith.speculators.hub import one_line, split_revision
from draftsmith.speculators.precision import as_dtype, running_dtype, say_widened
from draftsmith.speculators.target import probe
from draftsmith.speculators.target.checkpoint_tensors import (
    Checkpoint,
    refuse_quantised,
    renaming,
)
from draftsmith.speculators.target.info import sketch_target

START_TOKENS = 64
# What the forward of a model without layers may raise.
_SHAPE_ERRORS = (UnsupportedTarget, AttributeError, LookupError, RuntimeError, TypeError)


class TargetHead(nn.Module):
    """Embedding, final norm and output head of a causal LM, frozen, with the sizes of the whole.

    `model`: a transformers model. `tap_layers`: the layers whose states a drafter reads, wherever
    these come from; i is `hidden_states[i]` of transformers for i < num_layers (0 is the embedding
    output, i the output of layer i-1) and the residual stream before the final norm for i =
    num_layers."""

    def __init__(self, model: PreTrainedModel, tap_layers: Sequence[int] = ()) -> None:
        super().__init__()
        self.model = model.eval().requires_grad_(False)
        self._parts = probe.find_parts(model)  # not a module: nothing in it is registered twice
        self.name_or_path: str = self._parts.name
        self.config: PretrainedConfig = self._parts.config
        self.num_layers = len(self._parts.layers)
        self.tap_layers = _check_taps(tap_layers, self.num_layers, self.name_or_path)
        self.dtype = self._parts.dtype
        self.device = self._parts.device
        self._final_norm: Callable[[Tensor], Tensor] | None = None  # found on first use
        # The files it was read from, which have its layers too; None: they are here, and whole.
        self.checkpoint: Checkpoint | None = None
        # Where hidden states come from: `features` of a FrozenTarget or the like. None: nowhere.
        self.source: Callable[..., Any] | None = None
        with torch.no_grad():
            self.head_to_logits, self.vocab_size = probe.confirm_logits(self._parts)

    @classmethod
    def from_pretrained(
        cls,
        path_or_id: str,
        *,
        tap_layers: Sequence[int] = (),
        dtype: torch.dtype | str = "auto",
        device: torch.device | str = "cpu",
        trust_remote_code: bool = False,
        revision: str | None = None,
    ) -> TargetHead:
        """Loads the tensors that `TargetHead` names, from safetensors, and no decoder layer.
        Arguments as of `FrozenTarget.from_pretrained`. Errors: CheckpointError, UnsupportedTarget;
        QuantisedTensors for an embedding or output head that is quantised."""
        reader = ModelReader(
            path_or_id,
            dtype=dtype,
            device=device,
            trust_remote_code=trust_remote_code,
            revision=revision,
        )
        head = _confirmed(reader.without_layers(), tap_layers)
        del head._parts.layers[:]
        head.checkpoint = reader.checkpoint
        return head.to(device)

    # ------------------------------------------------------------------ what it is

    @property
    def hidden_size(self) -> int:
        """H, of the residual stream."""
        return self.config.hidden_size

    @property
    def checkpoint_dtype(self) -> torch.dtype:
        """The dtype of exports: the target's, or the checkpoint's where that was widened."""
        stored = as_dtype(self.config.dtype or self.dtype)
        widened = self.dtype == running_dtype("auto", stored, self.device) != stored
        return stored if widened else self.dtype

    @property
    def embed_tokens(self) -> nn.Module:
        """The input embedding, with its scale where the module applies one (Gemma)."""
        return self._parts.embed_tokens

    @property
    def lm_head(self) -> nn.Module:
        """The output head: normed states [..., H] -> [..., V], before a cap or scale of logits."""
        return self._parts.lm_head

    @property
    def head_weight(self) -> Tensor:
        """[V, H] of the output head, float32."""
        return self.lm_head.weight.float()  # type: ignore[operator,return-value]

    @property
    def final_norm_weight(self) -> Tensor | None:
        """[H] float32: the scale of the norm before the head, as a plain RMS norm would hold it;
        None if there is no such norm. Of a layer norm the bias is left out, as heads have none."""
        try:
            norm = self._norm_before_head()
        except UnsupportedTarget:
            return None
        return probe.norm_scale(norm, self.hidden_size, dtype=self.dtype, device=self.device)

    def train(self, mode: bool = True) -> TargetHead:
        """A frozen target has no training mode."""
        return super().train(False)

    def _apply(self, fn: Callable, *args, **kwargs) -> TargetHead:
        super()._apply(fn, *args, **kwargs)
        self.dtype = self._parts.dtype
        self.device = self._parts.device
        return self

    # ------------------------------------------------------------------ what it computes

    def forward(self, input_ids: Tensor) -> tuple[Tensor | None, Tensor]:
        """input_ids [B, T], texts of one length -> taps [B, T, n·H] (None without taps) and
        last_hidden [B, T, H]. Errors as of `features`."""
        positions = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        segments = torch.zeros_like(input_ids)
        features = self.features(input_ids, positions, segments, segments.bool())
        return features.taps, features.last_hidden

    def features(self, *packed: Tensor) -> Any:
        """As of `FrozenTarget.features`, from the `source`. ConfigError: there is none."""
        if self.source is None:
            raise ConfigError(
                "its hidden states are needed, and only embedding, final norm and output head are"
                " loaded; load the whole as a FrozenTarget",
                where=f"target {self.name_or_path}",
            )
        return self.source(*packed)

    def start_text(self) -> Tensor:
        """[1, START_TOKENS] token ids spread over the vocabulary, on whose hidden states a drafter
        that `reads_start_text` scales its starting weights."""
        ids = torch.arange(START_TOKENS, device=self.device)[None]
        return ids * 7919 % self.vocab_size

    def logits(self, last_hidden: Tensor) -> Tensor:
        """last_hidden [..., H] -> logits [..., V], with the model's own scale and soft cap."""
        return self.head_to_logits(self._parts.lm_head(last_hidden))  # scaled and capped

    def final_norm(self, residual: Tensor) -> Tensor:
        """The stream after the last layer (tap `num_layers`) [..., H] -> last_hidden [..., H]."""
        with torch.no_grad():
            return self._norm_before_head()(residual)

    def _norm_before_head(self) -> Callable[[Tensor], Tensor]:
        """UnsupportedTarget if there is none."""
        if self._final_norm is None:
            with torch.no_grad():
                self._final_norm = probe.find_final_norm(self._parts)
        return self._final_norm


def _check_taps(tap_layers: Sequence[int], n: int, name: str) -> tuple[int, ...]:
    bad = [tap for tap in tap_layers if not isinstance(tap, int) or not 0 <= tap <= n]
    if bad or len(set(tap_layers)) != len(tap_layers):
        raise ConfigError(
            f"tap_layers={list(tap_layers)}: expected distinct numbers in 0..{n} "
            f"(0 = embedding output, i = output of layer i-1, {n} = before the final norm)",
            where=f"target {name}",
        )
    return tuple(sorted(tap_layers))


# ---------------------------------------------------------------------- a model without its layers


class _PassThrough(nn.Module):
    """In the place of a decoder layer: its input is its output. It has the attributes by which a
    decoder chooses masks and the like, but no weights."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.returns_tuple = False
        for name, value in vars(layer).items():
            if name not in vars(self) and not name.startswith("_"):
                setattr(self, name, value)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        return (hidden_states,) if self.returns_tuple else hidden_states


def remove_layers(model: PreTrainedModel) -> tuple[str, list[nn.Module]]:
    """Takes the decoder layers out of a model, and the modules beside its language model, such as a
    vision tower. Returns the name of the list of layers, which is empty then, and the layers."""
    parts = probe.find_parts(model)
    name = next(name for name, module in model.named_modules() if module is parts.layers)
    layers = list(parts.layers)
    del parts.layers[:]
    kept: set[nn.Module] = set()
    for root in (parts.decoder, parts.embed_tokens, parts.lm_head):
        kept |= set(root.modules())
    for module in set(model.modules()) - kept:
        for child_name, child in list(module.named_children()):
            if kept.isdisjoint(child.modules()):
                setattr(module, child_name, nn.Identity())
    return name, layers


def _class_of_part(
    whole: type[PreTrainedModel], layer: int | None, config: PretrainedConfig | None
) -> type[PreTrainedModel]:
    """The class of a model whose instances have no layers but this one, in its place, before they
    get any memory. `config`: what they share with others in place of a copy of their own."""

    def __init__(self: Any, copied: PretrainedConfig, *args: Any, **kwargs: Any) -> None:
        whole.__init__(self, copied if config is None else config, *args, **kwargs)
        name, layers = remove_layers(self)
        if layer is not None:
            self.get_submodule(name).add_module(str(layer), layers[layer])

    members = {"__init__": __init__, "__module__": whole.__module__}
    return type(whole.__name__, (whole,), members)


class ModelReader:
    """Reads a model from a checkpoint in parts, on the CPU: all but its decoder layers, then one
    layer at a time. `layers_name`: of the list of layers, which has `num_layers` of them.

    `path_or_id` and what follows: as of `TargetHead.from_pretrained`, and so are the errors.
    `device`: on which the model is to run."""

    def __init__(
        self,
        path_or_id: str,
        *,
        dtype: torch.dtype | str = "auto",
        device: torch.device | str = "cpu",
        trust_remote_code: bool = False,
        revision: str | None = None,
    ) -> None:
        self.path_or_id = path_or_id
        self.name, self.revision = split_revision(path_or_id, revision)
        self.dtype = dtype
        self.device = device
        skeleton = sketch_target(
            self.name, revision=self.revision, trust_remote_code=trust_remote_code
        ).model
        if probe.needs_eager(skeleton.config.get_text_config()):
            skeleton.set_attn_implementation("eager")
        self.config = copy.deepcopy(skeleton.config)
        # What is loaded is not quantised; if it is, that is noticed below.
        for part in (self.config, self.config.get_text_config()):
            vars(part).pop("quantization_config", None)
        self.whole_class = type(skeleton)
        self.checkpoint = Checkpoint(self.name, self.revision)
        self.files = self.checkpoint.shards()
        rename = renaming(skeleton, skeleton.state_dict())
        self.parameters = {name: rename(name) for name in self.files}
        self.layers_name, self._layers = remove_layers(skeleton)
        self.num_layers = len(self._layers)
        self._expected = skeleton.state_dict().keys()
        self._weights = self._read(self._expected)  # mapped files: no memory of this process

    def without_layers(self) -> PreTrainedModel:
        """The model with a `_PassThrough` in the place of every decoder layer."""
        model = self._build(None, self.config, self._weights, self.dtype)
        if self._widens(model.dtype):
            model.float()
            say_widened(self.name)
        model.config._name_or_path = self.name
        with suppress(OSError):  # it may have none
            model.generation_config = GenerationConfig.from_pretrained(
                self.name, revision=self.revision
            )
        places = [_PassThrough(layer) for layer in self._layers]
        model.get_submodule(self.layers_name).extend(places)
        return model

    def layer(self, number: int, model: PreTrainedModel) -> nn.Module:
        """A decoder layer for `model`, with which it shares its configuration; converted and
        packed, as experts are, by transformers."""
        name = f"{self.layers_name}.{number}"
        expected = {f"{name}.{tensor}" for tensor in self._layers[number].state_dict()}
        weights = self._weights | self._read(expected)
        dtype = as_dtype(model.config.dtype)
        try:
            layer = self._build(number, model.config, weights, dtype).get_submodule(name)
        except (AttributeError, LookupError, TypeError) as error:
            raise UnsupportedTarget(
                f"its layers cannot be built one by one ({error})",
                where=f"target {self.path_or_id}",
            ) from error
        return layer.float() if self._widens(dtype) else layer

    def _widens(self, dtype: torch.dtype) -> bool:
        return running_dtype(self.dtype, dtype, self.device) != dtype

    def _build(
        self,
        layer: int | None,
        config: PretrainedConfig,
        weights: dict[str, Tensor],
        dtype: torch.dtype | str,
    ) -> PreTrainedModel:
        shared = None if layer is None else config
        try:
            model, info = _class_of_part(self.whole_class, layer, shared).from_pretrained(
                None,
                config=config,
                state_dict=weights,
                dtype=dtype,
                attn_implementation=config._attn_implementation,
                ignore_mismatched_sizes=True,  # refused below, by name
                output_loading_info=True,
            )
        except (OSError, RuntimeError, ValueError) as error:
            raise CheckpointError(
                f"cannot load the weights: {one_line(error)}", where=f"target {self.path_or_id}"
            ) from error
        probe.refuse_incomplete(info, self.path_or_id)
        return model

    def _read(self, expected: Collection[str]) -> dict[str, Tensor]:
        parameters = self.parameters
        files = {name: file for name, file in self.files.items() if parameters[name] in expected}
        weights = self.checkpoint.read(files)
        refuse_quantised(weights, parameters, expected, self.checkpoint, self.path_or_id)
        return weights


def _confirmed(model: PreTrainedModel, tap_layers: Sequence[int]) -> TargetHead:
    """Probes a model without layers. Decoders differ in what they take from a layer: a tensor, or a
    tuple of it."""
    try:
        return _probed(model, tap_layers)
    except _SHAPE_ERRORS:
        for layer in model.modules():
            if isinstance(layer, _PassThrough):
                layer.returns_tuple = True
    try:
        return _probed(model, tap_layers)
    except _SHAPE_ERRORS as error:
        raise UnsupportedTarget(
            f"its embedding, final norm and output head cannot be run without its layers ({error})",
            where=f"target {model.config._name_or_path}",
        ) from error


def _probed(model: PreTrainedModel, tap_layers: Sequence[int]) -> TargetHead:
    head = TargetHead(model, tap_layers)
    with suppress(UnsupportedTarget):  # few ask for it, and it may have none
        head._norm_before_head()
    return head
