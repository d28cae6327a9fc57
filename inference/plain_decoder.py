"""A whole language model of plain decoder layers, run with few calls: what a small model's time is
made of.

transformers runs a model layer by layer in some forty calls each, which for a small model take
longer than its arithmetic. Here the layers of architectures that differ from Llama's by biases,
norms of queries and keys, and experts only are those of speculators/layers/decoder.py around the
very same weights, with projections of one input as one product. Whether they compute what the model
computes is tried out on a few tokens; a model that is not of this kind, or fails, runs as it is,
and the log says why. On a CPU the weights of a model of up to `MOST_PACKED` bytes are packed for
bfloat16 products, which holds them twice. Knows no family and no loss; for inference only."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from draftsmith.speculators.config import DecoderConfig
from draftsmith.speculators.layers import frozen_linear
from draftsmith.speculators.layers.decoder import DecoderLayer, RMSNorm, RotaryTable
from draftsmith.speculators.layers.frozen_linear import FrozenLinear
from draftsmith.speculators.layers.grouped_attention import cached_attends
from draftsmith.speculators.precision import free_memory
from draftsmith.speculators.target.frozen_target import FrozenTarget

logger = logging.getLogger(__name__)

MODEL_TYPES = ("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
TOLERANCE = {
    torch.float32: 1e-4,
    torch.bfloat16: 5e-2,
    torch.float16: 1e-2,
}  # of the states' root mean square
PROBE = (12, 1, 6, 5)  # tokens of the forwards that are tried out, one after the other
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


class TargetForward:
    """The forward of a target in decoding: with few calls where its layers are plain, else
    transformers' own."""

    def __init__(self, target: FrozenTarget) -> None:
        self._target, self._plain = target, plain_or_none(target, copies=False)

    def __call__(self, *inputs: Any) -> tuple[Tensor | None, Tensor]:
        """As `FrozenTarget.forward` over the `past_key_values` of a ragged cache."""
        return (self._target if self._plain is None else self._plain)(*inputs)

    def logits(self, last_hidden: Tensor) -> Tensor:
        """As `FrozenTarget.logits`: last_hidden [..., H] -> [..., V]."""
        return (self._target if self._plain is None else self._plain).logits(last_hidden)

    @property
    def is_plain(self) -> bool:
        return self._plain is not None

    def renew(self) -> bool:
        """Chooses again if the model is not made of the same modules, hooks and memory any more;
        True if so."""
        changed = self._plain is not None and self._plain.outdated
        if changed:
            self._plain = plain_or_none(self._target, copies=False)
        return changed

    def read_weights(self) -> None:
        """To be called when weights have changed in place."""
        if self._plain is not None:
            self._plain.read_weights()


class PlainDecoder:
    """`forward` and `logits` of `runner`, for a model that is made of plain layers (see
    `plain_decoder`).

    `copies`: products of several projections are copies, laid out for one row, which suits a small
    model whose weights do not change. Without them the weights of projections are moved, so
    that those of one input lie together; the only copies are then those packed for a CPU, which
    `read_weights` renews."""

    def __init__(self, runner: FrozenTarget, *, copies: bool) -> None:
        decoder, config = runner.decoder, _config_of(runner)
        packs = not copies and _packs(runner)
        self._embed, self._norm, self._taps = (
            runner.embed_tokens,
            _shared_norm(decoder.norm),
            runner.tap_layers,
        )
        self._positions = RotaryTable(config, decoder.rotary_emb)
        self._layers = [_around(layer, config) for layer in decoder.layers]
        self._packed: list[FrozenLinear] = []
        for layer in self._layers:
            layer.fuse(shared=not copies, packs=packs)
            if packs:
                self._packed += _packed_parts(layer)
        self._head: FrozenLinear | None = None
        self._runner = runner
        if packs and not _changed(runner.lm_head):
            self._head = FrozenLinear(runner.lm_head, shared=True, packs=True)
            self._packed.append(self._head)
        self._join_norms()
        if not copies and runner.device.type != "cpu":
            free_memory()  # that the weights were moved from
        self._modules = [*decoder.modules(), runner.lm_head]
        self._made_of = _make(self._modules)

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
        state, taps = self._embed(input_ids), []
        rotary = self._positions.lookup(position_ids, view.capacity, state)
        attends = cached_attends(view, mask, input_ids.shape[1], len(self._layers))
        for i, (layer, attend) in enumerate(zip(self._layers, attends, strict=True)):
            if i in self._taps:
                taps.append(state)
            state = layer(state, rotary, attend)
        if len(self._layers) in self._taps:
            taps.append(state)
        return torch.cat(taps, dim=-1) if taps else None, self._norm(state)

    def logits(self, last_hidden: Tensor) -> Tensor:
        """As `FrozenTarget.logits`."""
        if self._head is None or torch.is_grad_enabled():
            return self._runner.logits(last_hidden)
        return self._runner.head_to_logits(self._head(last_hidden))

    @property
    def packed_bytes(self) -> int:
        """Of the weights that are held twice."""
        return sum(product.weight.nbytes for product in self._packed)

    @property
    def outdated(self) -> bool:
        """True if a module, a hook or the memory of a weight is another than when this was made."""
        return _make(self._modules) != self._made_of

    def read_weights(self) -> None:
        """Renews what was made of the weights."""
        for product in self._packed:
            product.read_weights()
        self._join_norms()

    def _join_norms(self) -> None:
        for layer in self._layers:
            layer.self_attn.join_norms()


def plain_decoder(runner: FrozenTarget, *, copies: bool = True) -> PlainDecoder | str:
    """The model of `runner` with few calls, or the reason why it cannot be run so."""
    reason = _obstacle(runner, copies)
    if reason is not None:
        return reason
    plain = PlainDecoder(runner, copies=copies)
    return plain if _agrees(plain, runner) else "its layers compute something else than plain ones"


def plain_or_none(runner: FrozenTarget, *, copies: bool = True) -> PlainDecoder | None:
    """As `plain_decoder`; the log says which, and why."""
    plain = plain_decoder(runner, copies=copies)
    if isinstance(plain, str):
        logger.info("%s: decoding runs transformers' forward: %s", runner.name_or_path, plain)
        return None
    packed = (
        f", {plain.packed_bytes >> 20} MiB of weights packed for oneDNN"
        if plain.packed_bytes
        else ""
    )
    logger.info(
        "%s: decoding runs its %s layers with few calls%s",
        runner.name_or_path,
        runner.config.model_type,
        packed,
    )
    return plain


# ---------------------------------------------------------------- whether a model is of this kind


def _obstacle(runner: FrozenTarget, copies: bool) -> str | None:
    """What shows without computing anything that the model is not to be run so."""
    config = runner.config
    if config.model_type not in MODEL_TYPES:
        return f"model_type {config.model_type!r} is none of {', '.join(MODEL_TYPES)}"
    if runner.has_window:
        return "some layers have a sliding window"
    if config._attn_implementation == "eager":
        return "attn_implementation is eager"
    if runner.device.type == "meta":
        return "its weights have no values"
    for name, module in runner.decoder.named_modules():
        if not all(map(_only_reads, _hooks(module))):
            return f"{name or 'the decoder'} has a forward hook"
        replaced = module.__dict__.get("forward")
        if replaced is not None and not isinstance(replaced, FrozenLinear):
            return f"the forward of {name or 'the decoder'} was replaced"
    return None if copies else _other_weights(runner)


def _other_weights(runner: FrozenTarget) -> str | None:
    """Why weights cannot be moved: sharded, quantised, adapted, or on several devices."""
    for i, layer in enumerate(runner.layers):
        for name, part in _projections(layer):
            if type(part) is not nn.Linear:
                return f"{name} of layer {i} is a {type(part).__name__}, not a Linear"
    for name, weight in runner.layers.named_parameters():
        if type(weight.data) is not Tensor:
            return f"{name} is a {type(weight.data).__name__}"
        if weight.device != runner.device:
            return f"its weights are on {runner.device} and {weight.device}"
    return None


def _packs(runner: FrozenTarget) -> bool:
    """True if the projections and the head of a target are to be packed, and with the copy take no
    more than that."""
    weights = [part.weight for layer in runner.layers for _, part in _projections(layer)]
    if not _changed(runner.lm_head):
        weights.append(runner.lm_head.weight)
    return (
        frozen_linear.can_pack(weights[0])
        and sum(weight.nbytes for weight in weights) <= frozen_linear.MOST_PACKED
    )


def _changed(linear: nn.Module) -> bool:
    hooks = (*linear._forward_hooks, *linear._forward_pre_hooks)
    return type(linear) is not nn.Linear or bool(hooks) or "forward" in linear.__dict__


def _projections(layer: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    yield from ((part, getattr(layer.self_attn, part)) for part in PROJECTIONS)
    if hasattr(layer.mlp, "gate_proj"):
        yield from (
            (part, getattr(layer.mlp, part)) for part in ("gate_proj", "up_proj", "down_proj")
        )


def _hooks(module: nn.Module) -> Iterator[Any]:
    yield from module._forward_hooks.values()
    yield from module._forward_pre_hooks.values()


def _only_reads(hook: Any) -> bool:
    """True for hooks of targets, and of transformers' `output_hidden_states`, which plain decoding
    need not run."""
    return (
        getattr(hook, "is_tap", False)
        or getattr(hook, "__module__", "") == "transformers.utils.output_capturing"
    )


def _make(modules: list[nn.Module]) -> list[tuple]:
    """What each module consists of, in a form to compare."""
    return [
        (
            *m._forward_hooks,
            *m._forward_pre_hooks,
            m.__dict__.get("forward"),
            *m._modules.values(),
            *(p.data_ptr() for p in m._parameters.values() if p is not None),
        )
        for m in modules
    ]


def _agrees(plain: PlainDecoder, runner: FrozenTarget) -> bool:
    """True if both give the same taps and states after some tokens, in pieces and all at once."""
    total = sum(PROBE)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(runner.vocab_size, (1, total), generator=generator).to(runner.device)
    positions = torch.arange(total, device=runner.device)[None]
    with torch.inference_mode():
        expected = _both(runner(ids, positions))
        whole, past, pieces = _both(plain(ids, positions, None, _Past())), _Past(), []
        for first, width in zip((sum(PROBE[:i]) for i in range(len(PROBE))), PROBE):
            new = slice(first, first + width)
            mask = (
                None
                if first == 0 or width == 1
                else positions[:, None, None, : new.stop] <= positions[0, new, None]
            )
            pieces.append(_both(plain(ids[:, new], positions[:, new], mask, past)))
        pieced = torch.cat(pieces, dim=1)
    sizes = [runner.hidden_size] * (expected.shape[-1] // runner.hidden_size)
    allowed = TOLERANCE.get(runner.dtype, 1e-4)
    return all(
        bool((state - right).abs().mean() < allowed * right.square().mean().sqrt())
        for other in (whole, pieced)
        for state, right in zip(other.split(sizes, -1), expected.split(sizes, -1), strict=True)
    )


def _both(features: tuple[Tensor | None, Tensor]) -> Tensor:
    """Taps and last states [1, T, (n + 1)·H], float32."""
    return torch.cat([feature for feature in features if feature is not None], dim=-1).float()


class _Past:
    """The least that a cache of one row must be."""

    capacity = sum(PROBE)

    def __init__(self) -> None:
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}

    def update(self, key: Tensor, value: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        if layer in self._kept:
            key, value = (
                torch.cat([old, new], dim=2) for old, new in zip(self._kept[layer], (key, value))
            )
        self._kept[layer] = key, value
        return key, value


# ---------------------------------------------------------------------- its layers


def _packed_parts(layer: DecoderLayer) -> Iterator[FrozenLinear]:
    """The packed products of a fused layer; those of one projection replace it."""
    for parent, name in ((layer.self_attn, "o_proj"), (layer.mlp, "down_proj")):
        if hasattr(parent, "fused"):  # experts run as they are
            linear = getattr(parent, name)
            delattr(parent, name)  # a module, which only a module may replace
            setattr(parent, name, FrozenLinear(linear, shared=True, packs=True))
            yield from (parent.fused, getattr(parent, name))


def _config_of(runner: FrozenTarget) -> DecoderConfig:
    fields = DecoderConfig.for_target(runner, "draft_model")
    attention = runner.layers[0].self_attn
    return DecoderConfig(
        **fields,
        hidden_act=runner.config.hidden_act,
        qk_norm=hasattr(attention, "q_norm"),
        attention_bias=attention.q_proj.bias is not None,
    )


def _shared_norm(norm: nn.Module) -> RMSNorm:
    with torch.device("meta"):
        shared = RMSNorm(norm.weight.shape[0], eps=norm.variance_epsilon)
    shared.weight = norm.weight
    return shared


def _around(layer: nn.Module, config: DecoderConfig) -> DecoderLayer:
    """A DecoderLayer of the weights of transformers' `layer`."""
    with torch.device("meta"):
        plain = DecoderLayer(config)
    for name, module in plain.named_modules():
        if isinstance(module, RMSNorm):
            module.weight = layer.get_submodule(name).weight
    for part in PROJECTIONS:
        setattr(plain.self_attn, part, getattr(layer.self_attn, part))
    if hasattr(layer.mlp, "gate_proj"):
        for part in ("gate_proj", "up_proj", "down_proj"):
            setattr(plain.mlp, part, getattr(layer.mlp, part))
    else:  # experts
        plain.mlp = layer.mlp
    return plain.eval()
