"""A whole language model of plain decoder layers, run with few calls.

transformers takes some forty calls per layer, longer than a small model's arithmetic. Here the
layers of architectures that differ from Llama's by biases, norms of queries and keys, and experts
only are those of speculators/layers/decoder.py around the same weights, those of one input moved to
lie together. Whether they compute what the model computes is tried out on a few tokens; any other
model runs as it is, and the log says why. On a CPU up to `MOST_PACKED` bytes of weights are packed
for bfloat16 products, which holds them twice; float32 ones need no copy (`can_turn`). For inference
only."""

from __future__ import annotations

import logging
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from draftsmith.inference.kv_cache.ragged_cache import RaggedCache
from draftsmith.speculators.config import DecoderConfig
from draftsmith.speculators.layers.decoder import DecoderLayer, RMSNorm, RotaryTable
from draftsmith.speculators.layers.frozen_linear import (
    MOST_PACKED,
    FrozenLinear,
    can_pack,
    can_turn,
)
from draftsmith.speculators.layers.grouped_attention import cached_attends
from draftsmith.speculators.layers.int8_linear import Int8Linear
from draftsmith.speculators.precision import free_memory
from draftsmith.speculators.target.frozen_target import FrozenTarget
from draftsmith.speculators.target.ragged_rows import run_rows

logger = logging.getLogger(__name__)

WeightState = tuple[tuple[int, int], ...]  # of each parameter: address, number of writes

MODEL_TYPES = ("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
# of the states' root mean square
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
INT8_TOLERANCE = 2e-2  # the last bit of a state may change what its int8 number is
PROBE = (12, 1, 6, 5)  # tokens of the forwards that are tried out, one after the other
PROJECTIONS = {
    "self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
}


class PlainLayers:
    """The weights of a model of plain layers in fast form: layers, final norm, and the output head
    where a FrozenLinear is faster."""

    def __init__(self, runner: FrozenTarget, config: DecoderConfig) -> None:
        decoder = runner.decoder
        packs = _packs(runner)
        freezes = packs or can_turn(runner.lm_head.weight)
        with torch.device("meta"):
            self.norm = RMSNorm(decoder.norm.weight.shape[0], eps=decoder.norm.variance_epsilon)
        self.norm.weight = decoder.norm.weight
        self.layers = [_around(layer, config) for layer in decoder.layers]
        for layer in self.layers:
            layer.fuse(shared=True, packs=packs)
            if freezes:
                _freeze(layer, packs)
        self.head: FrozenLinear | None = None
        head = runner.lm_head
        # a drafter's is one already
        plain = type(head) is nn.Linear and "forward" not in head.__dict__
        if freezes and plain and not _alteration(head):
            self.head = FrozenLinear(head, shared=True, packs=packs)
        if runner.device.type != "cpu":
            free_memory()  # that the weights were moved from


class PlainDecoder:
    """`forward` and `logits` of `runner`, a model of plain layers."""

    def __init__(self, runner: FrozenTarget, config: DecoderConfig, weights: PlainLayers) -> None:
        self.weights = weights
        self._runner = runner
        self._embed = runner.embed_tokens
        self._taps = runner.tap_layers
        self._positions = RotaryTable(config, runner.decoder.rotary_emb)

    @torch.no_grad()
    def __call__(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        mask: Tensor | None,
        view,
        key_position_ids: Tensor | None = None,
    ) -> tuple[Tensor | None, Tensor]:
        """As `FrozenTarget.forward` over `view`, a cache's of this forward: taps [B, T, n·H] or
        None, states after the final norm [B, T, H]."""
        state = self._embed(input_ids)
        taps = []
        layers = self.weights.layers
        rotary = self._positions.lookup(position_ids, view.capacity, state)
        attends = cached_attends(view, mask, input_ids.shape[1], len(layers))
        for i, (layer, attend) in enumerate(zip(layers, attends, strict=True)):
            if i in self._taps:
                taps.append(state)
            state = layer(state, rotary, attend)
        if len(layers) in self._taps:
            taps.append(state)
        return torch.cat(taps, dim=-1) if taps else None, self.weights.norm(state)

    def logits(self, last_hidden: Tensor) -> Tensor:
        """As `FrozenTarget.logits`."""
        head = self.weights.head
        if head is None or torch.is_grad_enabled():
            return self._runner.logits(last_hidden)
        return self._runner.head_to_logits(head(last_hidden))


# By model, the fast form that somebody has now, and the state of the weights that it is of.
# Engines over one model share it, whatever layers each of them taps.
_IN_USE: WeakKeyDictionary[nn.Module, tuple[WeightState, ref[PlainLayers]]] = WeakKeyDictionary()


def plain_decoder(runner: FrozenTarget) -> PlainDecoder | str:
    """The model of `runner` with few calls, or the reason why it cannot be run so. Its weights in
    fast form are made and tried out once, until nobody has them or the model's are written to."""
    reason = _obstacle(runner)
    if reason is not None:
        return reason
    config = _config_of(runner)
    state, weights = _IN_USE.get(runner.model, (None, lambda: None))
    shared = weights()
    if shared is not None and state == _state_of(runner.model):
        return PlainDecoder(runner, config, shared)
    plain = PlainDecoder(runner, config, PlainLayers(runner, config))
    if not _agrees(plain, runner):
        return "its layers compute something else than plain ones"
    state = _state_of(runner.model)  # of weights that lie together by now
    if state is not None:
        _IN_USE[runner.model] = state, ref(plain.weights)
    return plain


def _state_of(model: nn.Module) -> WeightState | None:
    """Where each parameter lies, and how often it was written to; None if torch does not count
    that, as of tensors made in inference_mode."""
    parameters = list(model.parameters())
    if any(parameter.is_inference() for parameter in parameters):
        return None
    return tuple((parameter.data_ptr(), parameter._version) for parameter in parameters)


def _config_of(runner: FrozenTarget) -> DecoderConfig:
    attention = runner.layers[0].self_attn
    return DecoderConfig(
        **DecoderConfig.for_target(runner, "draft_model"),
        hidden_act=runner.config.hidden_act,
        qk_norm=hasattr(attention, "q_norm"),
        attention_bias=attention.q_proj.bias is not None,
    )


def plain_or_none(runner: FrozenTarget) -> PlainDecoder | None:
    """As `plain_decoder`; the log says which, and why."""
    plain = plain_decoder(runner)
    if isinstance(plain, str):
        logger.info("%s: decoding runs transformers' forward: %s", runner.name_or_path, plain)
        return None
    kind = runner.config.model_type
    logger.info("%s: decoding runs its %s layers with few calls", runner.name_or_path, kind)
    return plain


# ---------------------------------------------------------------- whether a model is of this kind


def _obstacle(runner: FrozenTarget) -> str | None:
    """What shows without computing anything that the model is not to be run so."""
    config = runner.config
    if config.model_type not in MODEL_TYPES:
        return f"model_type {config.model_type!r} is none of {', '.join(MODEL_TYPES)}"
    if runner.has_window:
        return "some layers have a sliding window"
    if config._attn_implementation == "eager":
        return "attn_implementation is eager"
    for name, module in runner.decoder.named_modules():
        if alteration := _alteration(module):
            return f"{name or 'the decoder'} {alteration}"
    return _obstacle_of_weights(runner)


def _obstacle_of_weights(runner: FrozenTarget) -> str | None:
    """Weights that cannot be moved: sharded, quantised, adapted, or on several devices."""
    for i, layer in enumerate(runner.layers):
        for part in _projections(layer):
            if type(part) not in (nn.Linear, Int8Linear):
                return f"layer {i} has a {type(part).__name__} in place of a Linear"
    for name, weight in runner.layers.named_parameters():
        if type(weight.data) is not Tensor:
            return f"{name} is a {type(weight.data).__name__}"
        if weight.device != runner.device:
            return f"its weights are on {runner.device} and {weight.device}"
    return None


def _alteration(module: nn.Module) -> str | None:
    """What was done to a module beside its class's forward. Hooks of targets and of transformers'
    `output_hidden_states` only read, and plain decoding need not run them."""
    for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
        reads = getattr(hook, "__module__", "") == "transformers.utils.output_capturing"
        if not (reads or getattr(hook, "is_tap", False)):
            return "has a forward hook"
    forward = module.__dict__.get("forward")
    if forward is not None and not isinstance(forward, FrozenLinear):
        return "has another forward"
    return None


def _projections(layer: nn.Module) -> list[nn.Module]:
    """Those of experts are not among them."""
    projections: list[nn.Module] = []
    for name, parts in PROJECTIONS.items():
        parent = getattr(layer, name)
        projections += [getattr(parent, part) for part in parts if hasattr(parent, part)]
    return projections


def _packs(runner: FrozenTarget) -> bool:
    """Whether the projections and the head are to be packed."""
    weights = [part.weight for layer in runner.layers for part in _projections(layer)]
    size = sum(weight.nbytes for weight in (*weights, runner.lm_head.weight))
    return can_pack(weights[0]) and size <= MOST_PACKED


def _agrees(plain: PlainDecoder, runner: FrozenTarget) -> bool:
    """True if both give the same taps and states after some tokens, all at once and in pieces."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(runner.vocab_size, (1, sum(PROBE)), generator=generator).to(runner.device)
    cache = RaggedCache(1, ids.shape[1], device=runner.device)
    pieces = []
    with torch.inference_mode():
        for piece in ids.split(PROBE, dim=1):
            pieces.append(_joined(run_rows(plain, cache, 0, piece), runner))
            cache.advance(0, piece.shape[1])
        expected = _joined(runner(ids, torch.arange(ids.shape[1], device=ids.device)[None]), runner)
    error = (torch.cat(pieces, dim=1) - expected).abs().mean((0, 1, 3))
    tolerance = TOLERANCE.get(runner.dtype, 1e-4)
    if any(type(module) is Int8Linear for module in runner.layers.modules()):
        tolerance = max(tolerance, INT8_TOLERANCE)
    allowed = tolerance * expected.square().mean((0, 1, 3)).sqrt()
    return bool((error < allowed).all())


def _joined(features: tuple[Tensor | None, Tensor], runner: FrozenTarget) -> Tensor:
    """Taps and last states [1, T, n + 1, H], float32."""
    parts = [feature for feature in features if feature is not None]
    return torch.cat(parts, dim=-1).float().unflatten(-1, (-1, runner.hidden_size))


# ---------------------------------------------------------------------- its layers


def _around(layer: nn.Module, config: DecoderConfig) -> DecoderLayer:
    """A DecoderLayer of the weights of transformers' `layer`."""
    with torch.device("meta"):
        plain = DecoderLayer(config)
    for name, module in plain.named_modules():
        if isinstance(module, RMSNorm):
            module.weight = layer.get_submodule(name).weight
    for part in PROJECTIONS["self_attn"]:
        setattr(plain.self_attn, part, getattr(layer.self_attn, part))
    if not hasattr(layer.mlp, "gate_proj"):
        plain.mlp = layer.mlp  # experts
    else:
        for part in PROJECTIONS["mlp"]:
            setattr(plain.mlp, part, getattr(layer.mlp, part))
    return plain.eval()


def _freeze(layer: DecoderLayer, packs: bool) -> None:
    """FrozenLinears in place of the single projections of a fused layer."""
    for parent, name in ((layer.self_attn, "o_proj"), (layer.mlp, "down_proj")):
        linear = getattr(parent, name, None)
        if hasattr(parent, "fused") and type(linear) is nn.Linear:  # experts run as they are
            delattr(parent, name)  # a module, which only a module may replace
            setattr(parent, name, FrozenLinear(linear, shared=True, packs=packs))
