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
from typing import Any

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
from transformers.masking_utils import eager_mask, sdpa_mask

from draftsmith.speculators.errors import CheckpointError, UnsupportedTarget
from draftsmith.speculators.layers.int8_linear import Int8Linear
from draftsmith.speculators.target.packed_attention import additive_mask, eager_function
from draftsmith.speculators.target.recurrent import RecurrentLayers, RecurrentStates, StateCache

ATTENTION = ("sdpa", "eager")  # the implementations that honour an arbitrary mask
FULL = "full_attention"
SLIDING = "sliding_attention"
STATES = "states"  # a layer without keys and values: recurrent, or without memory of the text
_RECURRENT_LAYERS = "linear mamba ssm conv recurrent rwkv hybrid gated_delta".split()
_RECURRENT_FIELDS = (
    "mamba_d_state ssm_state_size ssm_cfg lru_width linear_conv_kernel_dim conv_L_cache".split()
)
_LOGIT_SCALES = ("logits_scaling", "logit_scale", "lm_head_multiplier", "output_multiplier_scale")
_SOFT_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
CACHE_NAMES = ("past_key_values", "cache_params", "cache")  # the last one from transformers 5.20 on
OF_STATES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_PROBE_ERRORS = (TypeError, ValueError, AttributeError, LookupError, RuntimeError)
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
    kinds: tuple[str, ...]  # per layer FULL, SLIDING, STATES, or another name of the config's
    window: int  # of the sliding layers; 0 without any
    cache_name: str  # its forward's name for a cache
    has_positions: bool  # its forward takes position ids and masks
    stateful: bool  # its config, or transformers, says that it keeps states beside keys and values

    def refusal(self, why: str) -> UnsupportedTarget:
        """The error for this target, to be raised."""
        return UnsupportedTarget(f"{why}", where=f"target {self.name}")

    def decode(self, input_ids: Tensor, cache: Any = None, position_ids: Any = None, mask=None):
        """The decoder's output; by default that of its plain forward over texts."""
        arguments: dict = {"input_ids": input_ids, "use_cache": cache is not None}
        if cache is not None:
            arguments[self.cache_name] = cache
        if self.has_positions:
            arguments |= {"position_ids": position_ids} if position_ids is not None else {}
            arguments |= {"attention_mask": mask} if mask is not None else {}
        return self.decoder(**arguments)

    @property
    def dtype(self) -> torch.dtype:
        """That of the states: quantised weights have others."""
        dtypes = (p.dtype for p in self.layers.parameters() if p.dtype in OF_STATES)
        return next(dtypes, self.model.dtype)

    @property
    def device(self) -> torch.device:
        """That of the input embedding, where token ids go."""
        return self.embed_tokens.weight.device  # type: ignore[return-value]


def is_quantised(model: PreTrainedModel) -> bool:
    """True if transformers keeps quantised weights as they are."""
    quantizer = getattr(model, "hf_quantizer", None)
    return quantizer is not None and not getattr(quantizer.quantization_config, "dequantize", False)


def has_plain_weight(module: nn.Module) -> bool:
    """False if the weight of a linear layer or embedding is quantised in a way not our own."""
    if isinstance(module, Int8Linear):  # a draft model's own, which nobody shares
        return True
    weight = getattr(module, "weight", None)
    if weight is None or weight.dtype not in OF_STATES:
        return False
    return not hasattr(weight, "tensor_data_names")  # as torchao's quantised weights have


# ---------------------------------------------------------------------- parts and refusals


def find_parts(model: PreTrainedModel) -> Parts:
    """Finds the parts by their roles. Errors: UnsupportedTarget."""
    config = model.config.get_text_config()
    name = getattr(model.config, "_name_or_path", "") or type(model).__name__
    if reason := _unsuitable(model, config):
        raise UnsupportedTarget(f"{reason}", where=f"target {name}")
    n = config.num_hidden_layers
    # Some classes take the model, or its head, for the decoder.
    for decoder in (model.get_decoder(), *model.children()):
        modules = decoder.modules() if decoder not in (None, model) else ()
        if lists := [m for m in modules if isinstance(m, nn.ModuleList) and len(m) == n]:
            break
    else:
        raise UnsupportedTarget(
            f"no module list of num_hidden_layers={n} layers in its decoder", where=f"target {name}"
        )
    kinds = _layer_kinds(config)
    window = 0
    if SLIDING in kinds:
        window = int(getattr(config, "sliding_window", None) or 0)
    parameters = inspect.signature(decoder.forward).parameters
    cache_name = next((name for name in CACHE_NAMES if name in parameters), CACHE_NAMES[0])
    return Parts(
        name=name,
        config=config,
        model=model,
        decoder=decoder,
        layers=max(lists, key=lambda m: sum(p.numel() for p in m.parameters())),
        embed_tokens=model.get_input_embeddings(),
        lm_head=model.get_output_embeddings(),
        kinds=kinds,
        window=window,
        cache_name=cache_name,
        has_positions="position_ids" in parameters or cache_name == CACHE_NAMES[0],
        stateful=_keeps_states(model, config),
    )


def _unsuitable(model: PreTrainedModel, config: PretrainedConfig) -> str:
    """Why it is no causal LM that can be asked for features; empty: it is one."""
    embed_tokens = model.get_input_embeddings()
    head = model.get_output_embeddings()
    attention = config._attn_implementation
    if any(getattr(part, "is_encoder_decoder", False) for part in (config, model.config)):
        return "an encoder-decoder model; a decoder-only causal LM is needed"
    if attention not in ATTENTION:
        return (
            f"attention implementation {attention!r} cannot honour arbitrary masks; load it with"
            " attn_implementation='sdpa' or 'eager'"
        )
    if attention != "eager" and needs_eager(config):
        return (
            f"attn_logit_softcapping={config.attn_logit_softcapping} is silently left out by"
            f" {attention!r} attention; load it with attn_implementation='eager'"
        )
    if embed_tokens is None or head is None:
        return "no input embedding or no output head; a causal LM is needed"
    for name, module in (("input embedding", embed_tokens), ("output head", head)):
        if not has_plain_weight(module):
            return (
                f"its {name} is quantised ({type(module).__name__}), which drafters share; use a"
                " checkpoint whose own is not"
            )
    return ""


def _keeps_states(model: PreTrainedModel, config: PretrainedConfig) -> bool:
    """True if layer types, config fields or transformers' own mark say so."""
    kinds = getattr(config, "layer_types", None) or ()
    return (
        any(name in kind for kind in kinds for name in _RECURRENT_LAYERS)
        or any(getattr(config, field, None) is not None for field in _RECURRENT_FIELDS)
        or getattr(model, "_is_stateful", False)
    )


def needs_eager(config: PretrainedConfig) -> bool:
    """True if attention scores have a soft cap, which faster implementations leave out."""
    return bool(getattr(config, "attn_logit_softcapping", None))


def refuse_incomplete(info: dict, name: str) -> None:
    """CheckpointError if from_pretrained's `info` has missing or mismatched tensors."""
    faults = [str(error) for error in info.get("error_msgs") or ()]
    for kind, what in (("missing_keys", "are missing"), ("mismatched_keys", "have another shape")):
        if names := sorted(map(str, info.get(kind) or ())):
            faults.append(f"{len(names)} tensors {what}, such as {names[:3]}")
    if faults:
        raise CheckpointError(
            f"{'; '.join(faults)}. Such tensors would be random; fix the checkpoint",
            where=f"target {name}",
        )


def _layer_kinds(config: PretrainedConfig) -> tuple[str, ...]:
    """Each layer's kind by the config, which `confirm_masks` and `find_recurrent` check."""
    usual = SLIDING if getattr(config, "sliding_window", None) else FULL
    kinds = getattr(config, "layer_types", None) or [usual] * config.num_hidden_layers
    of_gpt_neo = getattr(config, "attention_layers", None) or ()
    return (*kinds, *(kind for kind in of_gpt_neo if kind == "local"))


# ---------------------------------------------------------------------- the probes


class _ZeroPast(Cache):
    """`length` zero keys and values: two tokens show the masks of a long past."""

    is_compileable = False
    is_sliding: tuple[bool, ...] = ()

    def __init__(self, length: int) -> None:
        self.layers: list = []
        self.length = length

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args, **kwargs):
        past = (0, 0, self.length, 0)
        return nn.functional.pad(key_states, past), nn.functional.pad(value_states, past)

    def _as_given(self, states: Tensor, *args, **kwargs) -> Tensor:
        return states

    def _nothing(self, *args, **kwargs) -> None:
        return None

    update_conv_state = _as_given
    update_recurrent_state = _as_given
    has_previous_state = _nothing  # type: ignore[assignment]
    is_recording_past = _nothing  # type: ignore[assignment]
    # from transformers 5.20 on
    get_conv_state = _nothing
    get_recurrent_state = _nothing

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
    kinds = set(parts.kinds)
    window = parts.window
    if kinds - {FULL, SLIDING, STATES} or (SLIDING in kinds and not window):
        raise parts.refusal(
            f"layer types {sorted(kinds)} with sliding_window={window or None}; only {FULL} and"
            f" {SLIDING} (with a window) can be masked for rows of different length"
        )
    attending = kinds - {STATES}
    if not attending:
        return False
    length = min(window or 3, _PROBE_PREFIX_LIMIT)
    keys = torch.arange(length + 2)
    queries = torch.arange(length, length + 2)[:, None]
    causal = keys <= queries  # [2, S]
    expected = {FULL: causal, SLIDING: causal & (keys > queries - window)}

    observed = _try(parts, "a forward with a cache", lambda: _masks_seen(parts, None, length))
    for i, (kind, mask) in enumerate(zip(parts.kinds, observed)):
        if kind != STATES and not _allows(mask, expected[kind]):
            raise parts.refusal(
                f"layer {i} is {kind} (sliding_window={window or None}) by its config, but the keys"
                " it may see are others; its masks cannot be rebuilt for rows of different length"
            )
    prepared = {
        kind: additive_mask(mask.to(parts.device)[None, None], parts.dtype)
        for kind, mask in expected.items()
    }
    return _takes_masks_by_kind(parts, attending, prepared, length)


def _takes_masks_by_kind(
    parts: Parts, attending: set[str], prepared: dict[str, Tensor], length: int
) -> bool:
    """True if masks reach the layers as a dict by kind, False if as one tensor. `attending`: the
    kinds that there are; `prepared`: a mask for each. UnsupportedTarget: neither does."""
    reason = "layers of several kinds got others"
    for by_kind in (True, False) if len(attending) == 1 else (True,):
        mask_argument = masks_by_kind(**prepared) if by_kind else prepared[min(attending)]
        try:
            seen = list(zip(parts.kinds, _masks_seen(parts, mask_argument, length)))
        except _PROBE_ERRORS as error:
            reason = f"{type(error).__name__}: {error}"
            continue
        pointers = [
            (kind, mask.data_ptr() if isinstance(mask, Tensor) else 0) for kind, mask in seen
        ]
        # the very tensor, not a copy that a layer was given in its place
        if all(kind == STATES or at == prepared[kind].data_ptr() for kind, at in pointers):
            return by_kind
    raise parts.refusal(
        f"a mask prepared outside does not reach its layers unchanged ({reason}); rows of different"
        " length cannot be verified together"
    )


def _allows(mask: Tensor | None, expected: Tensor) -> bool:
    """True if a layer's mask lets see what is `expected` [2, S]."""
    if mask is None or not (mask.dtype == torch.bool or mask.is_floating_point()):
        return False
    seen = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    return torch.equal(seen[0, 0].cpu(), expected)


def masks_by_kind(
    full_attention: Tensor | None, sliding_attention: Tensor | None
) -> dict[str, Tensor | None]:
    """Masks under transformers' names of layer types; recurrent layers get none."""
    full = full_attention
    sliding = sliding_attention
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
    positions = torch.arange(2, device=parts.device)[None]
    try:
        parts.decode(_probe_ids(parts, 2), _ZeroPast(past), positions, attention_mask)
    finally:
        for handle in handles:
            handle.remove()
    return [seen.get(layer) for layer in parts.layers]


def _try(parts: Parts, what: str, call: Callable):
    try:
        return call()
    except _PROBE_ERRORS as error:
        raise parts.refusal(f"{what} failed: {error}") from error


def _tolerance(dtype: torch.dtype) -> float:
    """The relative error that another order of the same arithmetic may cause."""
    return 1e-3 if dtype in (torch.float32, torch.float64) else 0.05


def _error(a: Tensor, b: Tensor) -> Tensor:
    """|a - b| / |b| per token: [..., D] -> [...]."""
    a = a.float()
    b = b.float()
    return (a - b).norm(dim=-1) / b.norm(dim=-1).clamp_min(1e-12)


def attends_by_name(parts: Parts) -> bool:
    """True if every layer attends by the implementation that the config names, under the mask that
    it receives, so that another one can replace it. A layer with attention of its own may take
    another path for any name but "sdpa", and one that makes a mask per head needs that mask. Of
    "eager" layers the function of their modeling file has to be theirs."""
    name = parts.config._attn_implementation
    asked: set[nn.Module] = set()

    def attend(module, query, key, value, attention_mask, *args, **kwargs) -> tuple[Tensor, None]:
        if attention_mask is None or attention_mask.shape[1] == 1:
            asked.add(module)
        usual = sdpa_attention_forward if name == "sdpa" else eager_function(module)
        return usual(module, query, key, value, attention_mask, *args, **kwargs)

    ids = _probe_ids(parts, 2)
    whole = parts.decode(ids).last_hidden_state
    AttentionInterface.register(_PROBE_ATTENTION, attend)
    AttentionMaskInterface.register(_PROBE_ATTENTION, sdpa_mask if name == "sdpa" else eager_mask)
    parts.config._attn_implementation = _PROBE_ATTENTION
    try:
        by_name = parts.decode(ids).last_hidden_state
    except _PROBE_ERRORS:
        return False
    finally:
        parts.config._attn_implementation = name
    if not _error(by_name, whole).median() <= _tolerance(parts.dtype):
        return False
    return all(any(module in asked for module in layer.modules()) for layer in parts.layers)


def confirm_logits(parts: Parts) -> tuple[Callable[[Tensor], Tensor], int]:
    """How the head's output becomes logits: by constants of the config, as is observed."""
    hidden: list[Tensor] = []
    hook = parts.lm_head.register_forward_pre_hook(lambda module, args: hidden.append(args[0]))
    ids = _probe_ids(parts, 5)
    run = lambda: parts.model(input_ids=ids, use_cache=False).logits
    try:
        expected = _try(parts, "its own forward", run)  # [1, 5, V]
    finally:
        hook.remove()
    if not hidden:
        raise parts.refusal("its forward does not call its output head")
    last_hidden = parts.decode(ids).last_hidden_state
    allowed = _tolerance(parts.dtype)
    same = hidden[0].shape == last_hidden.shape
    if not same or _error(last_hidden, hidden[0]).median() > allowed:
        raise parts.refusal("its states are changed between its decoder and its output head")
    raw = parts.lm_head(hidden[0])
    candidates = [
        (_error(t(raw), expected).max().item(), t) for t in _logit_transforms(parts.config)
    ]
    error, transform = min(candidates, key=lambda pair: pair[0])  # the first of equally good ones
    if not error <= allowed / 10:
        raise parts.refusal(
            "its logits are not its output head followed by a known scale or soft cap"
            f" ({', '.join((*_LOGIT_SCALES, *_SOFT_CAPS))})"
        )
    return transform, expected.shape[-1]


def confirm_causal(parts: Parts) -> None:
    """UnsupportedTarget if states depend on later tokens; by the median, since a router at a tie
    may change some."""
    ids = _probe_ids(parts, 7)
    part, whole = (parts.decode(x).last_hidden_state for x in (ids[:, :4], ids))
    if part.shape[:2] != (1, 4) or _error(whole[:, :4], part).median() > _tolerance(parts.dtype):
        raise parts.refusal(
            "its states depend on later tokens, or are not one per token; a causal LM is needed"
        )


def _logit_transforms(config: PretrainedConfig) -> list[Callable[[Tensor], Tensor]]:
    """Each scale of the config as divisor, factor or unused, soft-capped or not."""
    scalings: list[Callable] = [lambda x: x]
    for scale in (getattr(config, field, None) for field in _LOGIT_SCALES):
        if scale and scale != 1.0:
            scalings += [lambda x, s=scale: x / s, lambda x, s=scale: x * s]
    cap = next((value for field in _SOFT_CAPS if (value := getattr(config, field, None))), None)
    capped = [lambda x, scaled=scaled: torch.tanh(scaled(x) / cap) * cap for scaled in scalings]
    return [*(capped if cap else ()), *scalings]


def find_final_norm(parts: Parts) -> Callable[[Tensor], Tensor]:
    """The module that maps the last layer's output to the last hidden state."""
    seen: list[Tensor] = []
    first = lambda output: output[0] if isinstance(output, tuple) else output
    hook = parts.layers[-1].register_forward_hook(lambda *call: seen.append(first(call[-1])))
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
    raise parts.refusal(
        "no module of its decoder takes its last layer's output to its last hidden state; features"
        " of another engine, which end before the final norm, cannot be used (features.engine:"
        " draftsmith)"
    )


def norm_scale(
    norm: Callable[[Tensor], Tensor], width: int, *, dtype: torch.dtype, device: torch.device
) -> Tensor | None:
    """[width] float32: what `norm` multiplies each channel of a normed state with, or None if it
    does not divide a state by its size.

    A norm may hold this scale as it is, as its difference from 1 (Gemma), or not at all. For x of
    mean 0, RMS and layer norms give x / rms(x) · scale + bias alike, and (norm(x) - norm(-x)) / 2
    has no bias. x is far above the epsilon of any norm."""
    x = torch.full((width,), 16.0)
    x[1::2] *= -1
    if width % 2:
        x[-3:] = torch.tensor([16.0, 16.0, -32.0])
    rows = torch.stack([x, -x, 4 * x]).to(device, dtype)
    try:
        with torch.no_grad():
            plus, minus, larger = norm(rows[None])[0].float()
    except _PROBE_ERRORS:
        return None
    if not _error(larger, plus) <= _tolerance(dtype):
        return None
    x = rows[0].float()
    return (plus - minus) / 2 * x.square().mean().sqrt() / x


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
            raise parts.refusal(
                "packed sequences influence each other or positions are ignored; such attention"
                " (ALiBi, for one) cannot be masked from outside"
            )


# ---------------------------------------------------------------------- recurrent layers


class _Observed(DynamicCache):
    """transformers' cache, which records who gives it keys and who states."""

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

    Errors: UnsupportedTarget, if a layer's state is not in the cache, or looks like its
    keys."""
    if not parts.stateful:
        return parts, None
    inside: list[nn.Module] = []
    modules = [module for layer in parts.layers for module in layer.modules()]
    handles = [m.register_forward_pre_hook(lambda m, args: inside.append(m)) for m in modules]
    handles += [m.register_forward_hook(lambda *call: inside.pop() and None) for m in modules]
    try:
        cache = _try(parts, "a cache of its layer types", lambda: _Observed(parts.config, inside))
        _try(parts, "a forward with a cache", lambda: parts.decode(_probe_ids(parts, 5), cache))
    finally:
        for handle in handles:
            handle.remove()
    both = any(module in cache.keyed for module in cache.mixers)
    if both or not cache.mixers:
        kept = "states outside of transformers' cache"
        raise parts.refusal(
            f"its layers keep {'keys and states in one module' if both else kept}, where they"
            " cannot be rolled back"
        )
    kinds = []
    for layer, kind in enumerate(parts.kinds):
        if layer not in cache.attending:
            kinds.append(STATES)
        else:
            kinds.append(SLIDING if "sliding" in kind else FULL)
    window = int(getattr(parts.config, "sliding_window", None) or 0) if SLIDING in kinds else 0
    numbers = tuple(getattr(layer, "number_of_states", 0) for layer in cache.layers)
    recurrent = RecurrentLayers(tuple(cache.mixers), numbers)
    return replace(parts, kinds=tuple(kinds), window=window), recurrent


class _Keys(StateCache):
    """Keys and values of one row, beside its states; `keep` of them remain."""

    is_sliding: tuple[bool, ...] = ()

    def __init__(self, keys: dict[int, tuple[Tensor, Tensor]], layers: list, kept: int) -> None:
        super().__init__(layers)
        self.keys = keys
        self.kept = kept

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args, **kwargs):
        new = (key_states, value_states)
        if layer_idx in self.keys:
            old = [x[:, :, : self.kept] for x in self.keys[layer_idx]]
            new = torch.cat([old[0], new[0]], 2), torch.cat([old[1], new[1]], 2)
        self.keys[layer_idx] = new
        return new

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.kept

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.kept + query_length, 0


# Tokens of each forward, and how many of them are kept: a start, a rollback, a single token, a
# rest.
_ROUNDS = ((5, 2), (4, 1), (1, 1), (5, 5))


def confirm_rollback(parts: Parts, recurrent: RecurrentLayers) -> RecurrentLayers:
    """Confirms that states which were rolled back continue a text as if nothing else had been read:
    `found`, stepwise if its mixers must be. Errors: UnsupportedTarget."""
    ids = _probe_ids(parts, sum(kept for _, kept in _ROUNDS))
    whole = parts.decode(ids).last_hidden_state
    reason = "its hidden states change"
    for layers in (recurrent, replace(recurrent, stepwise=True)):
        try:
            if _rounds_error(parts, layers, ids, whole) <= _tolerance(parts.dtype):
                return layers
        except _PROBE_ERRORS as error:
            reason = f"{type(error).__name__}: {error}"
    raise parts.refusal(
        f"its recurrent states cannot be rolled back when drafts are rejected ({reason})"
    )


def _rounds_error(parts: Parts, recurrent: RecurrentLayers, ids: Tensor, whole: Tensor) -> float:
    """The largest median error of all rounds, from an empty row and from zero states."""
    states = RecurrentStates(recurrent, 1)
    worst = 0.0
    for begin_fresh in (True, False):
        keys: dict[int, tuple[Tensor, Tensor]] = {}
        past = 0
        for T, kept in _ROUNDS:
            read = slice(past, past + T)
            with states.forward(0, 1, T, fresh=begin_fresh and past == 0) as layers:
                positions = torch.arange(T, device=parts.device)[None] + past
                cache = _Keys(keys, layers, past)
                hidden = parts.decode(ids[:, read], cache, positions).last_hidden_state
            worst = max(worst, _error(hidden, whole[:, read]).median().item())
            states.keep(0, [kept])
            past += kept
        states.reset(0)
    return worst
