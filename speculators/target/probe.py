"""Probes of a model that becomes a FrozenTarget: its modules, logits, masks, recurrent states and
packing.

These functions run the model on a few tokens and compare with what its config claims. What cannot
be confirmed is refused with the reason, since a wrong mask or scale would silently change the
target's output. No architecture is known by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.cache_utils import Cache, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from speculators.errors import CheckpointError, UnsupportedTarget
from speculators.target.recurrent import RecurrentLayers, RecurrentStates, StateCache

ATTENTION = ("sdpa", "eager")  # the implementations that honour an arbitrary mask
FULL, SLIDING = "full_attention", "sliding_attention"
STATES = "states"  # a layer without keys and values: recurrent, or without memory of the text
_RECURRENT_LAYERS = ("linear", "mamba", "ssm", "conv", "recurrent", "rwkv", "hybrid", "gated_delta")
_RECURRENT_FIELDS = (
    "mamba_d_state",
    "ssm_state_size",
    "ssm_cfg",
    "lru_width",
    "linear_conv_kernel_dim",
    "conv_L_cache",
)
_LOGIT_SCALES = ("logits_scaling", "logit_scale", "lm_head_multiplier", "output_multiplier_scale")
_SOFT_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
_OF_STATES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_PROBE_ERRORS = (
    TypeError,
    ValueError,
    AttributeError,
    IndexError,
    KeyError,
    RuntimeError,
    NotImplementedError,
)
_PROBE_ATTENTION = "draftsmith_probe"
_PROBE_PREFIX_LIMIT = 32768  # longest past of the mask probe; longer windows are not confirmed


@dataclass(frozen=True)
class Parts:
    """The modules of a causal LM that a target uses, and their attention by its config."""

    name: str  # for messages
    config: PretrainedConfig  # of the text model
    model: PreTrainedModel
    decoder: nn.Module  # ids -> last_hidden_state
    layers: nn.ModuleList
    embed_tokens: nn.Module
    lm_head: nn.Module
    kinds: tuple[
        str, ...
    ]  # per layer FULL, SLIDING or STATES, or a name of the config's that is none of them
    window: int  # of the sliding layers; 0 without any
    cache_name: str  # its forward's name for a cache
    stateful: bool  # its config, or transformers, says that it keeps states beside keys and values

    def decode(
        self,
        input_ids: Tensor,
        cache: Cache | None = None,
        position_ids: Tensor | None = None,
        mask=None,
    ):
        """The decoder's output. Without cache, positions and mask: its own plain forward over whole
        texts."""
        given: dict = {"input_ids": input_ids, "use_cache": cache is not None}
        if cache is not None:
            given[self.cache_name] = cache
        if self.cache_name == "past_key_values":  # others have no positions
            given |= {"position_ids": position_ids} if position_ids is not None else {}
            given |= {"attention_mask": mask} if mask is not None else {}
        return self.decoder(**given)

    @property
    def dtype(self) -> torch.dtype:
        """That of the states: quantised weights have others."""
        return next(
            (p.dtype for p in self.layers.parameters() if p.dtype in _OF_STATES), self.model.dtype
        )

    @property
    def device(self) -> torch.device:
        return next(self.layers.parameters()).device

    @property
    def has_values(self) -> bool:
        """False for weights without memory, of which nothing can be asked but shapes."""
        return (
            not has_plain_weight(self.lm_head)
            or self.lm_head.weight.untyped_storage().device.type != "meta"
        )


def is_quantised(model: PreTrainedModel) -> bool:
    """True if transformers keeps quantised weights, and has not turned them into plain ones in
    loading."""
    quantizer = getattr(model, "hf_quantizer", None)
    return quantizer is not None and not getattr(quantizer.quantization_config, "dequantize", False)


def has_plain_weight(module: nn.Module) -> bool:
    """False if the weight of a linear layer or embedding is quantised."""
    weight = getattr(module, "weight", None)
    if weight is None or weight.dtype not in _OF_STATES:
        return False
    return not hasattr(
        weight, "tensor_data_names"
    )  # of the subclasses that torchao stores quantised weights in


def additive_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """bool -> 0 where True, the most negative number elsewhere (finite: a row that sees nothing
    gives no NaN)."""
    zero, floor = _mask_values(dtype, mask.device)
    return torch.where(mask, zero, floor)


@lru_cache
def _mask_values(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """The two values of an additive mask, cached: on small models creating them is measurable in
    every step."""
    with torch.inference_mode(False):
        floor = torch.full((), torch.finfo(dtype).min, dtype=dtype, device=device)
        return torch.zeros_like(floor), floor


# ---------------------------------------------------------------------- parts and refusals


def find_parts(model: PreTrainedModel) -> Parts:
    """Finds decoder, layers, embedding and head by their roles. Errors: UnsupportedTarget."""
    config = model.config.get_text_config()
    name = getattr(model.config, "_name_or_path", "") or type(model).__name__
    _refuse_unsupported(model, config, name)
    n = config.num_hidden_layers
    candidates = [
        model.get_decoder(),
        *model.children(),
    ]  # some classes take the model, or its head, for the decoder
    lists_of = lambda module: [
        m for m in module.modules() if isinstance(m, nn.ModuleList) and len(m) == n
    ]
    found = (
        (each, lists_of(each)) for each in candidates if each is not None and each is not model
    )
    decoder, lists = next((pair for pair in found if pair[1]), (model, []))
    if not lists:
        raise UnsupportedTarget(
            f"target {name}: no module list of num_hidden_layers={n} layers in its decoder"
        )
    layers = max(lists, key=lambda m: sum(p.numel() for p in m.parameters()))
    embed_tokens, lm_head = model.get_input_embeddings(), model.get_output_embeddings()
    if embed_tokens is None or lm_head is None:
        raise UnsupportedTarget(
            f"target {name}: no input embedding or no output head; a causal LM is needed"
        )
    if not has_plain_weight(embed_tokens):
        raise UnsupportedTarget(
            f"target {name}: its input embedding is quantised ({type(embed_tokens).__name__}),"
            " which heads share; use a checkpoint whose embedding is not"
        )
    kinds = _layer_kinds(config)
    window = int(getattr(config, "sliding_window", None) or 0) if SLIDING in kinds else 0
    names = inspect.signature(decoder.forward).parameters
    cache_name = "cache_params" if "cache_params" in names else "past_key_values"
    stateful = bool(_state_signs(model, config))
    return Parts(
        name,
        config,
        model,
        decoder,
        layers,
        embed_tokens,
        lm_head,
        kinds,
        window,
        cache_name,
        stateful,
    )


def _refuse_unsupported(model: PreTrainedModel, config: PretrainedConfig, name: str) -> None:
    """UnsupportedTarget for what is no causal LM, and for unsuitable attention."""
    if getattr(config, "is_encoder_decoder", False) or getattr(
        model.config, "is_encoder_decoder", False
    ):
        raise UnsupportedTarget(
            f"target {name}: an encoder-decoder model; a decoder-only causal LM is needed"
        )
    if config._attn_implementation not in ATTENTION:
        raise UnsupportedTarget(
            f"target {name}: attention implementation {config._attn_implementation!r} cannot honour"
            " arbitrary masks; load it with attn_implementation='sdpa' or 'eager'"
        )
    if config._attn_implementation != "eager" and needs_eager(config):
        raise UnsupportedTarget(
            f"target {name}: attn_logit_softcapping={config.attn_logit_softcapping} is silently"
            f" left out by {config._attn_implementation!r} attention; load it with"
            " attn_implementation='eager'"
        )


def _state_signs(model: PreTrainedModel, config: PretrainedConfig) -> list[str]:
    """What says that some layers keep states: layer types, config fields, transformers' own
    mark."""
    kinds = {
        k
        for k in getattr(config, "layer_types", None) or ()
        if any(r in k for r in _RECURRENT_LAYERS)
    }
    fields = [field for field in _RECURRENT_FIELDS if getattr(config, field, None) is not None]
    return [
        *sorted(kinds),
        *fields,
        *(["_is_stateful"] if getattr(model, "_is_stateful", False) else []),
    ]


def needs_eager(config: PretrainedConfig) -> bool:
    """True if attention scores have a soft cap, which faster implementations leave out."""
    return bool(getattr(config, "attn_logit_softcapping", None))


def refuse_incomplete(info: dict, name: str) -> None:
    """CheckpointError if from_pretrained's `info` reports missing or mismatched tensors. Extra ones
    are fine."""
    missing = sorted(info.get("missing_keys") or ())
    mismatched = sorted(str(key) for key in info.get("mismatched_keys") or ())
    errors = info.get("error_msgs") or ()
    if missing or mismatched or errors:
        parts = [f"{len(missing)} tensors are missing, such as {missing[:3]}"] if missing else []
        parts += (
            [f"{len(mismatched)} have another shape, such as {mismatched[:3]}"]
            if mismatched
            else []
        )
        parts += [str(error) for error in errors]
        raise CheckpointError(
            f"target {name}: {'; '.join(parts)}. Such tensors would be random; fix the checkpoint"
        )


def _layer_kinds(config: PretrainedConfig) -> tuple[str, ...]:
    """The kind of each layer, as the config has it; `confirm_masks` and `find_recurrent` check
    it."""
    window = getattr(config, "sliding_window", None)
    kinds = (
        getattr(config, "layer_types", None)
        or [SLIDING if window else FULL] * config.num_hidden_layers
    )
    return (
        *kinds,
        *(kind for kind in getattr(config, "attention_layers", None) or () if kind == "local"),
    )  # GPT-Neo


# ---------------------------------------------------------------------- the probes


class _ZeroPast(Cache):
    """A cache of `length` zero keys and values that stores nothing. With it two tokens show masks
    of a long past."""

    is_compileable = False
    is_sliding: tuple[bool, ...] = ()

    def __init__(self, length: int) -> None:
        self.layers: list = []
        self.length = length

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args, **kwargs):
        new = (key_states, value_states)
        return tuple(
            torch.cat([x.new_zeros(*x.shape[:2], self.length, x.shape[3]), x], dim=2) for x in new
        )

    def update_conv_state(self, conv_states: Tensor, *args, **kwargs) -> Tensor:
        return conv_states

    def update_recurrent_state(self, recurrent_states: Tensor, *args, **kwargs) -> Tensor:
        return recurrent_states

    def has_previous_state(self, *args, **kwargs) -> bool:
        return False

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.length + query_length, 0


def _probe_ids(parts: Parts, count: int) -> Tensor:
    """[1, count] token ids spread over the vocabulary."""
    rows = parts.embed_tokens.weight.shape[0]
    return (torch.arange(count, device=parts.device)[None] * 7919 + 3) % rows


def confirm_masks(parts: Parts) -> bool:
    """Confirms which keys each layer sees, and that prepared masks reach the layers unchanged.

    Returns True if masks are passed as a dict by kind of layer, False if as one tensor, for models
    of one kind."""
    unknown = sorted(set(parts.kinds) - {FULL, SLIDING, STATES})
    if unknown or (SLIDING in parts.kinds and not parts.window):
        raise UnsupportedTarget(
            f"target {parts.name}: layer types {sorted(set(parts.kinds))} with"
            f" sliding_window={parts.window or None}; only {FULL} and {SLIDING} (with a window) can"
            " be masked for rows of different length"
        )
    attending = set(parts.kinds) - {STATES}
    if not attending:
        return False
    length = min(parts.window or 3, _PROBE_PREFIX_LIMIT)
    keys, queries = torch.arange(length + 2), torch.arange(length, length + 2)[:, None]
    causal = keys <= queries  # [2, S]
    expected = {FULL: causal, SLIDING: causal & (keys > queries - parts.window)}

    observed = _try(parts, "a forward with a cache", lambda: _masks_seen(parts, None, length))
    for i, (kind, mask) in enumerate(zip(parts.kinds, observed)):
        if kind == STATES:
            continue
        allowed = mask
        if mask is not None and mask.dtype != torch.bool:
            allowed = mask > torch.finfo(mask.dtype).min / 2 if mask.is_floating_point() else None
        if allowed is None or not torch.equal(allowed[0, 0].cpu(), expected[kind]):
            raise UnsupportedTarget(
                f"target {parts.name}: layer {i} is {kind} (sliding_window={parts.window or None})"
                " by its config, but the keys it may see are others; its masks cannot be rebuilt"
                " for rows of different length"
            )
    ready = {
        k: additive_mask(m.to(parts.device)[None, None], parts.dtype) for k, m in expected.items()
    }
    reason = "layers of several kinds got others"
    for by_kind in (True, False) if len(attending) == 1 else (True,):
        try:
            seen = _masks_seen(
                parts, masks_by_kind(**ready) if by_kind else ready[min(attending)], length
            )
        except _PROBE_ERRORS as error:
            reason = f"{type(error).__name__}: {error}"
            continue
        if all(
            kind == STATES or _same_memory(mask, ready[kind])
            for kind, mask in zip(parts.kinds, seen)
        ):
            return by_kind
    raise UnsupportedTarget(
        f"target {parts.name}: a mask prepared outside does not reach its layers unchanged"
        f" ({reason}); rows of different length cannot be verified together"
    )


def masks_by_kind(
    full_attention: Tensor | None, sliding_attention: Tensor | None
) -> dict[str, Tensor | None]:
    """Masks under transformers' names of layer types; recurrent layers, which know padding alone,
    get none."""
    full, sliding = full_attention, sliding_attention
    attention = {FULL: full, "hybrid": full, SLIDING: sliding, "hybrid_sliding": sliding}
    return attention | dict.fromkeys(("linear_attention", "conv", "moe", "mlp"))


def _masks_seen(
    parts: Parts, attention_mask: Tensor | dict | None, past: int
) -> list[Tensor | None]:
    """The mask of each layer for two tokens after `past` others."""
    seen: dict[nn.Module, Tensor | None] = {}

    def record(layer: nn.Module, args: tuple, kwargs: dict) -> None:
        bound = inspect.signature(layer.forward).bind_partial(*args, **kwargs)
        seen[layer] = bound.arguments.get("attention_mask")

    handles = [layer.register_forward_pre_hook(record, with_kwargs=True) for layer in parts.layers]
    try:
        parts.decode(
            _probe_ids(parts, 2),
            _ZeroPast(past),
            torch.arange(2, device=parts.device)[None],
            attention_mask,
        )
    finally:
        for handle in handles:
            handle.remove()
    return [seen.get(layer) for layer in parts.layers]


def _same_memory(a: Tensor | None, b: Tensor) -> bool:
    return isinstance(a, Tensor) and a.data_ptr() == b.data_ptr() and a.shape == b.shape


def _try(parts: Parts, what: str, call: Callable):
    try:
        return call()
    except _PROBE_ERRORS as error:
        raise UnsupportedTarget(f"target {parts.name}: {what} failed: {error}") from error


def _tolerance(dtype: torch.dtype) -> float:
    """The relative error that another order of the same arithmetic may cause."""
    return 1e-3 if dtype in (torch.float32, torch.float64) else 0.05


def _error(a: Tensor, b: Tensor) -> Tensor:
    """|a - b| / |b| per token: [..., D] -> [...]."""
    a, b = a.float(), b.float()
    return (a - b).norm(dim=-1) / b.norm(dim=-1).clamp_min(1e-12)


def attends_by_name(parts: Parts) -> bool:
    """True if every layer attends by the implementation that the config names, under the mask that
    it receives, so that a faster one can replace sdpa. A layer with attention of its own may take
    another path for any name but "sdpa", and one that makes a mask per head needs that mask."""
    if parts.config._attn_implementation != "sdpa":
        return False
    asked: set[nn.Module] = set()

    def attend(module, query, key, value, attention_mask, *args, **kwargs) -> tuple[Tensor, None]:
        if attention_mask is None or attention_mask.shape[1] == 1:
            asked.add(module)
        return sdpa_attention_forward(module, query, key, value, attention_mask, *args, **kwargs)

    AttentionInterface.register(_PROBE_ATTENTION, attend)
    AttentionMaskInterface.register(_PROBE_ATTENTION, sdpa_mask)
    parts.config._attn_implementation = _PROBE_ATTENTION
    try:
        parts.decode(_probe_ids(parts, 2))
    except _PROBE_ERRORS:
        return False
    finally:
        parts.config._attn_implementation = "sdpa"
    return all(any(module in asked for module in layer.modules()) for layer in parts.layers)


def confirm_logits(parts: Parts) -> tuple[Callable[[Tensor], Tensor], int]:
    """Finds how the head's output becomes logits: the constants are in the config, their use is
    observed."""
    hidden: list[Tensor] = []
    hook = parts.lm_head.register_forward_pre_hook(lambda module, args: hidden.append(args[0]))
    ids = _probe_ids(parts, 5)
    try:
        own = _try(
            parts, "its own forward", lambda: parts.model(input_ids=ids, use_cache=False)
        ).logits  # [1, 5, V]
    finally:
        hook.remove()
    if not hidden:
        raise UnsupportedTarget(f"target {parts.name}: its forward does not call its output head")
    last_hidden = parts.decode(ids).last_hidden_state
    if hidden[0].shape != last_hidden.shape or _error(last_hidden, hidden[0]).median() > _tolerance(
        parts.dtype
    ):
        raise UnsupportedTarget(
            f"target {parts.name}: the hidden states are changed between its decoder and its output"
            " head"
        )
    raw = parts.lm_head(hidden[0])
    candidates = [(_error(t(raw), own).max().item(), t) for t in _logit_transforms(parts.config)]
    error, transform = min(
        candidates, key=lambda pair: pair[0]
    )  # the first, if several are as good
    if not error <= _tolerance(parts.dtype) / 10:
        raise UnsupportedTarget(
            f"target {parts.name}: its logits are not its output head followed by a known scale or"
            f" soft cap ({', '.join((*_LOGIT_SCALES, *_SOFT_CAPS))}); they could not be reproduced"
            " from hidden states"
        )
    return transform, own.shape[-1]


def confirm_causal(parts: Parts) -> None:
    """UnsupportedTarget if states depend on later tokens; by the median, since a router at a tie
    may change some."""
    ids = _probe_ids(parts, 7)
    part, whole = (parts.decode(each).last_hidden_state for each in (ids[:, :4], ids))
    if part.shape[:2] != (1, 4) or _error(whole[:, :4], part).median() > _tolerance(parts.dtype):
        raise UnsupportedTarget(
            f"target {parts.name}: its states depend on later tokens, or are not one per token; a"
            " causal LM is needed"
        )


def confirm_gradient(parts: Parts) -> bool:
    """False if a quantised output head passes no gradient, or another than that of its own rows."""
    if has_plain_weight(parts.lm_head):
        return True
    state = parts.embed_tokens(_probe_ids(parts, 2)).detach().requires_grad_()
    generator = torch.Generator().manual_seed(0)
    ways = torch.randn(32, state.shape[-1], generator=generator).to(state)  # along which it changes
    with torch.enable_grad(), suppress(*_PROBE_ERRORS):
        logits = parts.lm_head(state)
        (gradient,) = torch.autograd.grad(logits.float().square().sum() / 2, state)
        return bool((_error(gradient @ ways.T, logits @ parts.lm_head(ways).T) < 0.2).all())
    return False


def _logit_transforms(config: PretrainedConfig) -> list[Callable[[Tensor], Tensor]]:
    """Candidates: each scale of the config as divisor, factor or unused, with its soft cap or
    without."""
    scalings: list[Callable] = [lambda x: x]
    for scale in (getattr(config, field, None) for field in _LOGIT_SCALES):
        if scale and scale != 1.0:
            scalings += [lambda x, s=scale: x / s, lambda x, s=scale: x * s]
    cap = next((value for field in _SOFT_CAPS if (value := getattr(config, field, None))), None)
    if not cap:
        return scalings
    return [
        lambda x, scaled=scaled: torch.tanh(scaled(x) / cap) * cap for scaled in scalings
    ] + scalings


def find_final_norm(parts: Parts) -> Callable[[Tensor], Tensor]:
    """The final norm: the module outside the layers that maps the last layer's output to the last
    hidden state."""
    seen: list[Tensor] = []
    keep = lambda module, args, output: seen.append(
        output[0] if isinstance(output, tuple) else output
    )
    hook = parts.layers[-1].register_forward_hook(keep)
    try:
        last_hidden = parts.decode(_probe_ids(parts, 5)).last_hidden_state
    finally:
        hook.remove()
    inside = set(parts.layers.modules())
    for module in parts.decoder.modules():
        if module in inside or any(True for _ in module.children()):
            continue
        with suppress(*_PROBE_ERRORS):
            if _error(module(seen[0]), last_hidden).max() <= _tolerance(parts.dtype) / 10:
                return module.forward
    raise UnsupportedTarget(
        f"target {parts.name}: no module of its decoder takes its last layer's output to its last"
        " hidden state; features of another engine, which end before the final norm, cannot be"
        " used (features.engine: draftsmith)"
    )


def confirm_packing(parts: Parts, run: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
    """UnsupportedTarget unless two segments packed in one row give the same hidden states as each
    alone.

    `run`: input_ids, position_ids, segment_ids [1, T] -> last_hidden [1, T, H]."""
    ids = _probe_ids(parts, 9)
    segments = torch.tensor([[0] * 5 + [1] * 4], device=parts.device)
    positions = torch.cat([torch.arange(5), torch.arange(4)])[None].to(parts.device)
    packed = _try(parts, "a packed forward", lambda: run(ids, positions, segments))
    for piece in (slice(0, 5), slice(5, 9)):
        alone = parts.decode(ids[:, piece]).last_hidden_state
        # The median, since a router at a tie may send single tokens elsewhere; a wrong mask moves
        # nearly every token.
        if _error(packed[:, piece], alone).median() > _tolerance(parts.dtype):
            raise UnsupportedTarget(
                f"target {parts.name}: packed sequences influence each other or positions are"
                " ignored; such attention (ALiBi, for one) cannot be masked from outside"
            )


# ---------------------------------------------------------------------- recurrent layers


class _Observed(DynamicCache):
    """transformers' own cache of a model, which records the layers that give it keys and values and
    the modules that give it states."""

    def __init__(self, config: PretrainedConfig, inside: list[nn.Module]) -> None:
        super().__init__(config=config)
        self.inside = inside  # the modules whose forward runs, innermost last
        self.attending: set[int] = set()
        self.keyed: set[nn.Module] = set()
        self.mixers: dict[nn.Module, None] = {}  # in their order

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args, **kwargs):
        self.attending.add(layer_idx)
        self.keyed.add(self.inside[-1])
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def update_conv_state(self, conv_states: Tensor, *args, **kwargs) -> Tensor:
        self.mixers[self.inside[-1]] = None
        return super().update_conv_state(conv_states, *args, **kwargs)

    def update_recurrent_state(self, recurrent_states: Tensor, *args, **kwargs) -> Tensor:
        self.mixers[self.inside[-1]] = None
        return super().update_recurrent_state(recurrent_states, *args, **kwargs)


def find_recurrent(parts: Parts) -> tuple[Parts, RecurrentLayers | None]:
    """The modules that keep states, and the kinds of the layers by what they give to a cache. None:
    there are none.

    Errors: UnsupportedTarget, if a layer's state is not in the cache, or cannot be told from its
    keys."""
    if not parts.stateful:
        return parts, None
    inside: list[nn.Module] = []
    modules = [module for layer in parts.layers for module in layer.modules()]
    handles = [m.register_forward_pre_hook(lambda m, args: inside.append(m)) for m in modules]
    handles += [
        m.register_forward_hook(lambda m, args, output: inside.pop() and None) for m in modules
    ]
    try:
        cache = _try(parts, "a cache of its layer types", lambda: _Observed(parts.config, inside))
        _try(parts, "a forward with a cache", lambda: parts.decode(_probe_ids(parts, 5), cache))
    finally:
        for handle in handles:
            handle.remove()
    both = [module for module in cache.mixers if module in cache.keyed]
    if not cache.mixers or both:
        why = (
            "keep states outside of transformers' cache"
            if not both
            else "keep keys and states in one module"
        )
        raise UnsupportedTarget(
            f"target {parts.name}: its layers {why}, where they cannot be rolled back"
        )
    kinds = [kind if i in cache.attending else STATES for i, kind in enumerate(parts.kinds)]
    sliding = any("sliding" in kind for kind in kinds)
    kinds = [k if k == STATES else SLIDING if "sliding" in k else FULL for k in kinds]
    window = int(getattr(parts.config, "sliding_window", None) or 0) if sliding else 0
    numbers = [getattr(layer, "number_of_states", 0) for layer in cache.layers]
    return replace(parts, kinds=tuple(kinds), window=window), RecurrentLayers(
        tuple(cache.mixers), tuple(numbers)
    )


class _Keys(StateCache):
    """Keys and values of one row, beside its states; `keep` of them remain."""

    is_sliding: tuple[bool, ...] = ()

    def __init__(self, keys: dict[int, tuple[Tensor, Tensor]], layers: list, kept: int) -> None:
        super().__init__(layers)
        self.keys, self.kept = keys, kept

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args, **kwargs):
        new = (key_states, value_states)
        if layer_idx in self.keys:
            new = tuple(
                torch.cat([old[:, :, : self.kept], x], 2)
                for old, x in zip(self.keys[layer_idx], new)
            )
        self.keys[layer_idx] = new
        return new

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.kept

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.kept + query_length, 0


# Tokens of each forward, and how many of them are kept: a start, a rollback, a single token, a
# rest.
_ROUNDS = ((5, 2), (4, 1), (1, 1), (5, 5))


def confirm_rollback(parts: Parts, found: RecurrentLayers) -> RecurrentLayers:
    """Confirms that states which were rolled back continue a text as if nothing else had been read:
    `found`, stepwise if its mixers must be. Errors: UnsupportedTarget."""
    ids = _probe_ids(parts, sum(kept for _, kept in _ROUNDS))
    whole = parts.decode(ids).last_hidden_state
    reason = "its hidden states change"
    for layers in (found, replace(found, stepwise=True)):
        try:
            if _rounds_error(parts, layers, ids, whole) <= _tolerance(parts.dtype):
                return layers
        except _PROBE_ERRORS as error:
            reason = f"{type(error).__name__}: {error}"
    raise UnsupportedTarget(
        f"target {parts.name}: its recurrent states cannot be rolled back when drafts are rejected"
        f" ({reason})"
    )


def _rounds_error(parts: Parts, found: RecurrentLayers, ids: Tensor, whole: Tensor) -> float:
    """The largest of the median errors of all rounds, from an empty row and from one with zero
    states."""
    states, worst = RecurrentStates(found, 1), 0.0
    for begin_fresh in (True, False):
        keys: dict[int, tuple[Tensor, Tensor]] = {}
        past = 0
        for T, kept in _ROUNDS:
            read = slice(past, past + T)
            with states.forward(0, 1, T, fresh=begin_fresh and past == 0) as layers:
                cache, positions = (
                    _Keys(keys, layers, past),
                    torch.arange(T, device=parts.device)[None] + past,
                )
                hidden = parts.decode(ids[:, read], cache, positions).last_hidden_state
            worst = max(worst, _error(hidden, whole[:, read]).median().item())
            states.keep(0, [kept])
            past += kept
        states.reset(0)
    return worst
