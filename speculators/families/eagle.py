"""EAGLE-1 (arXiv 2401.15077), and HASS (arXiv 2408.15766) as a way of training it.

Slot t joins the embedding of x_{t+1} with the target's last state h_t, runs both through `fc` and a
decoder layer whose input is not normed, and gives a guess of h_{t+1}: the target's own head makes
the distribution of x_{t+2} of it, and `fc` takes it in place of the target's state to draft
further. It has no final norm, no head and no vocabulary of its own. Tensor names are those of
vLLM's EAGLE loader."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from typing_extensions import override

from draftsmith.speculators.config import DecoderConfig
from draftsmith.speculators.drafter import DraftStep, Samples, valid_terms
from draftsmith.speculators.errors import ConfigError
from draftsmith.speculators.families.autoregressive import DecoderChain
from draftsmith.speculators.families.least_squares import fit_bytes, fit_flops, ridge, terms_for
from draftsmith.speculators.layers.decoder import Asked, Attends, DecoderLayer, Rotary, RotaryTable
from draftsmith.speculators.layers.int8_linear import dtype_of
from draftsmith.speculators.layers.kept_bytes import EXACT, Batch, layer_bytes
from draftsmith.speculators.options import DecoderOptions, VocabularyOptions
from draftsmith.speculators.precision import on_host
from draftsmith.speculators.target.frozen_target import TargetFeatures
from draftsmith.speculators.target.target_head import TargetHead
from draftsmith.speculators.traits import Traits

ROUNDS = 3  # of refitting the start to its own guesses, where several depths are trained
FULL_NOISE_LENGTH = 512  # tokens of a row whose features get `feature_noise` as it is


class EagleConfig(DecoderConfig):
    """The decoder layers; the vocabulary and the width are the target's."""

    fc_bias: bool = Field(
        False, description="fc has a bias, as some published heads have; vLLM drops it silently"
    )

    @model_validator(mode="after")
    def _no_window(self) -> Self:
        if self.sliding_window is not None:
            raise ValueError(
                "sliding_window: engines give an EAGLE-1 head no window; train an eagle3 head"
            )
        return self

    @override
    def describe(self) -> str:
        return super().describe() + ("; fc with a bias, which vLLM drops" if self.fc_bias else "")


class EagleOptions(DecoderOptions, VocabularyOptions):
    """The trained head. Sizes left null are the target's own."""

    feature_noise: float = Field(
        0.1,
        ge=0,
        description="uniform noise on states in training, +-feature_noise x 512 / tokens of a row",
    )
    detach: bool = Field(
        False,
        description="HASS: no gradient flows into the state that a depth reads; unroll_steps 3",
    )
    init: Literal["least_squares", "pass_through"] = Field(
        "least_squares",
        description="start as the best linear guess of the next state, or as the state passed on",
    )
    own_embeddings: bool = Field(
        False, description="train a copy of the target's embeddings; off: share them"
    )


class Eagle(DecoderChain):
    """EAGLE-1: the target's embedding and head, a projection, one or more layers."""

    config_class = EagleConfig
    options = EagleOptions
    defaults: ClassVar[dict[str, Any]] = {
        "loss": {"smooth_l1": 1.0, "forward_kl": 0.1},
        "training": {"learning_rate": 3e-5, "max_grad_norm": 0.5},
    }
    traits = Traits(reads_last_hidden=True)

    def __init__(self, config: EagleConfig) -> None:
        super().__init__(config)
        width = config.hidden_size
        self.fc = nn.Linear(2 * width, width, bias=config.fc_bias)
        self.layers = nn.ModuleList(
            DecoderLayer(config, input_norm=i > 0) for i in range(config.num_layers)
        )
        if config.own_embeddings:
            self.embed_tokens = nn.Embedding(config.vocab_size, width)
        self.positions = RotaryTable(config)
        self.feature_noise = 0.0
        self.detach = False

    @override
    @property
    def borrowed_head(self) -> TargetHead:
        """The target's: EAGLE has no output head."""
        return self.target

    # ---------------------------------------------------- starting weights, and how it is trained

    @override
    @torch.no_grad()
    def prepare_training(self, options: EagleOptions) -> Eagle:
        self.feature_noise = options.feature_noise
        self.detach = options.detach
        if self.config.fc_bias:  # vLLM drops it, so the head is trained without
            self.fc.bias.requires_grad_(False).zero_()
        if self.config.own_embeddings:
            self.embed_tokens.requires_grad_(options.own_embeddings)
        return self

    @override
    def start_terms(self, options: EagleOptions) -> int:
        return terms_for(self.fc.in_features) if options.init == "least_squares" else 0

    @override
    def start_bytes(self, options: EagleOptions, terms: int) -> int:
        """Of each term the embeddings and states of all depths, and as many numbers again of their
        regression."""
        states = 9 * options.unroll_steps + 2
        return fit_bytes(terms, states * self.config.hidden_size, self.fc.in_features)

    @override
    def start_flops(self, options: EagleOptions, terms: int) -> int:
        """The regression to the next state, and its rounds over all depths."""
        inputs = self.fc.in_features
        width = self.config.hidden_size
        depths = options.unroll_steps
        guess = 2 * terms * depths * inputs * width
        again = fit_flops(terms * depths, inputs, width) + guess
        return fit_flops(terms, inputs, width) + (ROUNDS * again if depths > 1 else 0)

    @override
    def once_kept(self, batch: Batch) -> int:
        """The target's states in float32."""
        return batch.tokens * EXACT * self.config.hidden_size

    @override
    def depth_kept(self, slots: int, batch: Batch) -> int:
        """What `fc` reads of an embedding and a state; the first layer reads it without a norm."""
        config = self.config
        joined = slots * batch.size * 2 * config.hidden_size
        layers = [
            layer_bytes(config, slots, batch, stream=batch.size, norms=min(i, 1))
            for i in range(config.num_layers)
        ]
        return joined + sum(layers)

    @torch.no_grad()
    def initialise_from(
        self, target: TargetHead, options: Any = None, features: Samples = None
    ) -> Eagle:
        """The layers start as next to nothing; `fc` alone makes the first guess."""
        self.start_small()
        if self.config.own_embeddings:
            ids = torch.arange(target.vocab_size, device=target.device)
            self.embed_tokens.weight.copy_(target.embed_tokens(ids))  # with its scale, if any
        if self.config.fc_bias:
            self.fc.bias.zero_()
        if features is None:
            width = self.config.hidden_size
            self.fc.weight.mul_(0.1)
            self.fc.weight[:, width:] += torch.eye(width, device=self.fc.weight.device)
        else:
            depths = options.unroll_steps if options else 1
            self.fc.weight.copy_(self._linear_guess(features, depths).T)
        return self

    def _linear_guess(self, features: Sequence[TargetFeatures], depths: int) -> Tensor:
        """W [2H, H] with [embedding of x_{t+1}; s_t] W ≈ h_{t+1}: at depth 0 s_t is the target's
        h_t, at deeper ones the guess itself, to which W is fitted again."""
        embeds: list[list[Tensor]] = [[] for _ in range(depths)]
        states: list[list[Tensor]] = [[] for _ in range(depths + 1)]
        for f in features:
            # with a term at every depth
            rows, slots = valid_terms(f, depths + 1).nonzero(as_tuple=True)
            for k in range(depths):
                embeds[k].append(self.embed(f.input_ids[rows, slots + k + 1]).float())
            for k in range(depths + 1):
                states[k].append(f.last_hidden[rows, slots + k].float())
        e = [torch.cat(tensors) for tensors in embeds]  # each [N, H]
        h = [torch.cat(tensors) for tensors in states]
        if not len(h[0]):
            raise ConfigError(
                f"least_squares needs responses longer than {depths} tokens; "
                "set drafter.init: pass_through",
                where="drafter.init",
            )
        guess = ridge(torch.cat([e[0], h[0]], 1), h[1])
        for _ in range(ROUNDS if depths > 1 else 0):
            state = h[0]
            inputs = []
            for k in range(depths):
                inputs.append(torch.cat([e[k], state], 1))
                state = inputs[-1] @ guess
            guess = ridge(torch.cat(inputs), torch.cat(h[1:]))
        return guess

    # -------------------------------------------------------------- training

    @override
    def unroll(self, features: TargetFeatures, steps: int) -> Iterator[DraftStep]:
        if self.training and self.feature_noise:
            noisy = _with_noise(features, self.feature_noise * FULL_NOISE_LENGTH)
            features = replace(features, last_hidden=noisy)
        return super().unroll(features, steps)

    @override
    def feed_back(self, state: Tensor) -> Tensor:
        return state.detach() if self.detach else state

    # -------------------------------------------------------------- shared by training and drafting

    def first_state(self, taps: Tensor | None, last_hidden: Tensor | None) -> Tensor:
        """last_hidden [B, T, H] as it is."""
        return last_hidden.to(dtype_of(self.fc))

    def run(
        self, embeds: Tensor, state: Tensor, rotary: Rotary, attends: Attends, queries: Asked = None
    ) -> Tensor:
        """The guess of the target's next state."""
        state = self.fc(torch.cat([embeds.to(state.dtype), state], dim=-1))
        last = len(self.layers) - 1
        for i, layer in enumerate(self.layers):
            state = layer(state, rotary, attends[i], queries if i == last else None)
        return state

    def head(self, hidden: Tensor, depth: int = 0) -> Tensor:
        """[N, H] -> [N, V_draft], by the target's head."""
        return self.borrowed_logits(hidden)


def _with_noise(features: TargetFeatures, reach: float) -> Tensor:
    """last_hidden [B, T, H] plus uniform noise in [-reach, reach] / the row's tokens, in float32 on
    whatever device.

    A row's noise follows from its seed and length, whatever rows it is padded and computed with;
    without seeds from torch's global random state."""
    states = features.last_hidden.float()
    seeds = torch.randint(2**62, (len(states),)) if features.seeds is None else features.seeds
    lengths = (on_host(features.segment_ids) >= 0).sum(1)
    noisy = states.clone()
    for row, (seed, length) in enumerate(zip(seeds.tolist(), lengths.tolist())):
        source = torch.Generator(states.device).manual_seed(seed)
        noise = torch.rand(length, states.shape[-1], generator=source, device=states.device)
        noisy[row, :length] += (2 * noise - 1) * (reach / max(length, 1))
    return noisy
