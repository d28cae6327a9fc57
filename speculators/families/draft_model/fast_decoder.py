"""A whole language model of plain decoder layers, run with few calls: what a small draft model's time is made of.

transformers runs a model layer by layer in some forty calls each, which for a small model take longer than its
arithmetic. Here the layers of architectures that differ from Llama's by biases and norms of queries and keys only are
those of speculators/layers/decoder.py around the very same weights, with projections of one input as one product.
Whether they compute what the model computes is tried out on a few tokens; a model that is not of this kind, or fails,
runs as it is. Knows no family and no loss; for inference only, and never for a target.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from speculators.config import DecoderConfig
from speculators.layers.attention import cached_attends
from speculators.layers.decoder import DecoderLayer, RMSNorm, RotaryTable, freeze_norms
from speculators.target.frozen_target import FrozenTarget

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}  # of the states' root mean square
PROBE = 24  # tokens


class PlainDecoder:
    """`forward` and `logits` of `runner`, for a model that is made of plain layers (see `plain_decoder`).

    The weights are the model's own; products of several projections are copies, so that it must be made anew when the
    weights change.
    """

    def __init__(self, runner: FrozenTarget) -> None:
        decoder, config = runner.model.get_decoder(), _config_of(runner)
        self._embed, self._norm = runner.embed_tokens, _shared_norm(decoder.norm)
        self._positions = RotaryTable(config, decoder.rotary_emb)
        self._layers = [_around(layer, config) for layer in decoder.layers]
        self.logits = runner.logits

    @torch.no_grad()
    def __call__(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        mask: Tensor | None,
        view,
        key_position_ids: Tensor | None = None,
    ) -> tuple[None, Tensor]:
        """As `FrozenTarget.forward` over `view`, a cache's of this forward: None, states after the final norm
        [B, T, H]."""
        state = self._embed(input_ids)
        rotary = self._positions.lookup(position_ids, view.capacity, state)
        attends = cached_attends(view, mask, input_ids.shape[1], len(self._layers))
        for layer, attend in zip(self._layers, attends, strict=True):
            state = layer(state, rotary, attend)
        return None, self._norm(state)


def plain_decoder(runner: FrozenTarget) -> PlainDecoder | None:
    """The model of `runner` with few calls; None if it is not made of plain layers only."""
    config = runner.config
    if config.model_type not in MODEL_TYPES or getattr(config, "mlp_bias", False) or runner.has_window:
        return None
    if runner.device.type == "meta":  # without values there is nothing to try out
        return None
    plain = PlainDecoder(runner)
    return plain if _agrees(plain, runner) else None


def _agrees(plain: PlainDecoder, runner: FrozenTarget) -> bool:
    """True if both give the same states after some tokens, one by one and all at once."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(runner.vocab_size, (1, PROBE), generator=generator).to(runner.device)
    positions = torch.arange(PROBE, device=runner.device)[None]
    with torch.inference_mode():
        wanted = runner(ids, positions)[1].float()
        found = plain(ids, positions, None, _Past())[1].float()
        past = _Past()
        last = [plain(ids[:, i : i + 1], positions[:, i : i + 1], None, past)[1] for i in range(PROBE)][-1].float()
    allowed = TOLERANCE.get(runner.dtype, 1e-4) * wanted.square().mean().sqrt()
    return bool((found - wanted).abs().mean() < allowed and (last - wanted[:, -1:]).abs().mean() < allowed)


class _Past:
    """The least that a cache of one row must be."""

    capacity = PROBE

    def __init__(self) -> None:
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}

    def update(self, key: Tensor, value: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        if layer in self._kept:
            key, value = (torch.cat([old, new], dim=2) for old, new in zip(self._kept[layer], (key, value)))
        self._kept[layer] = key, value
        return key, value


def _config_of(runner: FrozenTarget) -> DecoderConfig:
    fields = DecoderConfig.for_target(runner, "draft_model")
    attention = runner.model.get_decoder().layers[0].self_attn
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
    shared.freeze()
    return shared


def _around(layer: nn.Module, config: DecoderConfig) -> DecoderLayer:
    """A DecoderLayer of the weights of transformers' `layer`."""
    with torch.device("meta"):
        plain = DecoderLayer(config)
    for name, module in plain.named_modules():
        if isinstance(module, RMSNorm):
            module.weight = layer.get_submodule(name).weight
    for part in ("q_proj", "k_proj", "v_proj", "o_proj"):
        setattr(plain.self_attn, part, getattr(layer.self_attn, part))
    for part in ("gate_proj", "up_proj", "down_proj"):
        setattr(plain.mlp, part, getattr(layer.mlp, part))
    freeze_norms(plain)
    plain.fuse()
    return plain.eval()
