"""EAGLE-3 (arXiv 2503.01840) and the switches of EAGLE-3.1.

Slot t pairs the embedding of x_{t+1} with g_t, a projection of the target's taps at t, runs them
through one decoder layer and predicts x_{t+2}; further tokens come from the head's own state in
place of g. The vocabulary may be reduced. Tensor names are those of vLLM's EAGLE-3 loader, so an
export is this module's state under its own names."""

from __future__ import annotations

from typing import Any, Literal, Self

import torch
from pydantic import BaseModel, Field, model_validator
from torch import Tensor, nn
from typing_extensions import override

from draftsmith.speculators.config import DecoderConfig
from draftsmith.speculators.drafter import Samples
from draftsmith.speculators.families.autoregressive import DecoderChain
from draftsmith.speculators.families.eagle3_init import (
    SHARPNESS,
    flops_of_least_squares,
    start_from_least_squares,
    start_from_taps,
)
from draftsmith.speculators.families.least_squares import fit_bytes, terms_for
from draftsmith.speculators.layers.decoder import (
    Asked,
    Attends,
    DecoderLayer,
    RMSNorm,
    Rotary,
    RotaryTable,
)
from draftsmith.speculators.layers.int8_linear import dtype_of
from draftsmith.speculators.layers.kept_bytes import Batch, layer_bytes
from draftsmith.speculators.options import DecoderOptions, PositiveInt, TapOptions, VocabularySize
from draftsmith.speculators.target.target_head import TargetHead
from draftsmith.speculators.traits import Traits


class Eagle3Switches(BaseModel):
    """Those of EAGLE-3.1, and of the layer."""

    norm_before_fc: bool = Field(False, description="EAGLE-3.1: RMS norm over the joined taps")
    fc_norm: bool = Field(False, description="EAGLE-3.1: an RMS norm per tap, before fc")
    norm_output: bool = Field(
        False, description="EAGLE-3.1: feed the normed state back, not the one before the norm"
    )
    norm_before_residual: bool = Field(
        False, description="the residual is the normed projection of the taps"
    )
    qk_norm: bool = Field(False, description="norm queries and keys per head, as in Qwen3 layers")

    @model_validator(mode="after")
    def _one_norm_of_taps(self) -> Self:
        if self.norm_before_fc and self.fc_norm:
            raise ValueError("norm_before_fc and fc_norm both norm the taps; set one of them")
        return self


class Eagle3Config(Eagle3Switches, DecoderConfig):
    """The decoder layer, and EAGLE-3's switches."""

    @override
    def describe(self) -> str:
        named = ", ".join(name for name in Eagle3Switches.model_fields if getattr(self, name))
        return super().describe() + (f"; {named}" if named else "")


class Eagle3Options(Eagle3Switches, DecoderOptions, TapOptions):
    """The trained head. Sizes left null are the target's own."""

    draft_vocab_size: VocabularySize | None = Field(
        None,
        description="reduced vocabulary; auto: as measured to be fastest; null: the 32,000 most"
        " frequent tokens",
    )
    unroll_steps: PositiveInt = Field(
        7, description="depths unrolled on the head's own states in training"
    )
    init: Literal["taps", "least_squares"] = Field(
        "taps",
        description="start as the deepest tap, or fitted to some training rows (short trainings)",
    )
    own_embeddings: bool = Field(
        False, description="train a copy of the target's embeddings; off: share the frozen ones"
    )

    @model_validator(mode="after")
    def _switches_agree(self) -> Self:
        if self.sliding_window is not None and self.sliding_window < self.unroll_steps:
            raise ValueError(
                f"sliding_window ({self.sliding_window}): a draft reads its own chain; set it to"
                f" unroll_steps ({self.unroll_steps}) at least"
            )
        if self.init == "least_squares" and not self.norm_before_residual:
            raise ValueError("init: least_squares needs norm_before_residual: true")
        return self


class FirstLayer(DecoderLayer):
    """The layer that reads [norm(embedding); norm(state)], 2H wide."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__(config, inputs=2 * config.hidden_size)
        self.hidden_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.norm_before_residual = config.norm_before_residual

    @override
    def read(self, embeds: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """embeds, state [B, T, H] -> [B, T, 2H], and the residual [B, T, H]."""
        normed = self.hidden_norm(state)
        x = torch.cat([self.input_layernorm(embeds), normed], dim=-1)
        return x, normed if self.norm_before_residual else state


class Eagle3(DecoderChain):
    """EAGLE-3: n taps, a shared or own embedding, one or more layers, an own output head."""

    config_class = Eagle3Config
    options = Eagle3Options
    traits = Traits(reads_taps=True)

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__(config)
        width = config.hidden_size
        taps = len(config.tap_layers)
        self.fc = nn.Linear(taps * config.target_hidden_size, width, bias=False)
        eps = config.rms_norm_eps
        if config.norm_before_fc:
            self.input_norm = RMSNorm(taps * config.target_hidden_size, eps=eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(
                RMSNorm(config.target_hidden_size, eps=eps) for _ in range(taps)
            )
        self.layers = nn.ModuleList(
            [FirstLayer(config), *(DecoderLayer(config) for _ in range(config.num_layers - 1))]
        )
        self.norm = RMSNorm(width, eps=eps)
        self.lm_head = nn.Linear(width, config.draft_vocab_size, bias=False)
        if config.own_embeddings:
            self.embed_tokens = nn.Embedding(config.vocab_size, width)
        self.positions = RotaryTable(config)

    @override
    @property
    def vocabulary_heads(self) -> list[nn.Linear]:
        """Its output head, over the draft vocabulary."""
        return [self.lm_head]

    # -------------------------------------------------------------- starting weights

    @override
    def start_terms(self, options: Eagle3Options) -> int:
        return terms_for(self.fc.in_features) if options.init == "least_squares" else 0

    @override
    def start_bytes(self, options: Eagle3Options, terms: int) -> int:
        """Of each term what `fc` reads, and 31 states: 10 of the text, 20 of the recursion over
        four depths."""
        width = self.config.hidden_size
        inputs = max(self.fc.in_features, 2 * width, self.config.intermediate_size)
        return fit_bytes(terms, self.fc.in_features + 31 * width, inputs)

    @override
    def start_flops(self, options: Eagle3Options, terms: int) -> int:
        return flops_of_least_squares(self, terms)

    @override
    def once_kept(self, batch: Batch) -> int:
        """The taps, as `fc` multiplies them."""
        return batch.tokens * batch.size * self.fc.in_features

    @override
    def depth_kept(self, slots: int, batch: Batch) -> int:
        """The first layer norms and reads an embedding and a state."""
        config = self.config
        shape = {"stream": batch.size}
        first = layer_bytes(config, slots, batch, inputs=2 * config.hidden_size, norms=2, **shape)
        return first + (config.num_layers - 1) * layer_bytes(config, slots, batch, **shape)

    @property
    def reads_start_text(self) -> bool:
        """See `Drafter.reads_start_text`: a norm in front of `fc` needs no scale."""
        config = self.config
        same_width = config.target_hidden_size == config.hidden_size
        return same_width and not (config.norm_before_fc or config.fc_norm)

    @torch.no_grad()
    def initialise_from(
        self, target: TargetHead, options: Any = None, features: Samples = None
    ) -> Eagle3:
        """See `Drafter.initialise_from`. Rows of `lm_head` (and the embedding, if owned) are the
        target's own where the widths agree; `features` fit the rest in closed form
        (eagle3_init.py)."""
        if self.config.own_embeddings and self.config.hidden_size == self.config.target_hidden_size:
            self.embed_tokens.weight.copy_(target.embed_tokens.weight)
        if features is None:
            start_from_taps(self, target)
        else:
            start_from_least_squares(self, target, features)
        if self.config.target_hidden_size == self.config.hidden_size:
            rows = target.head_weight
            ids = self.draft_to_target
            self.lm_head.weight.copy_(rows if ids is None else rows[ids.to(rows.device)])
            if (norm := target.final_norm_weight) is not None:
                self.norm.weight.copy_(norm)
            if features is not None:
                self.norm.weight.mul_(SHARPNESS)
        return self

    # -------------------------------------------------------------- shared by training and drafting

    def first_state(self, taps: Tensor | None, last_hidden: Tensor | None) -> Tensor:
        """taps [B, T, n·H] -> g [B, T, H]."""
        return self.fc(self.read_taps(taps.to(dtype_of(self.fc))))

    def read_taps(self, taps: Tensor) -> Tensor:
        """taps [..., n·H] -> what `fc` reads of them [..., n·H]."""
        if self.config.norm_before_fc:
            taps = self.input_norm(taps)
        if self.config.fc_norm:
            parts = taps.chunk(len(self.fc_norm), dim=-1)
            taps = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts)], dim=-1)
        return taps

    def run(
        self, embeds: Tensor, state: Tensor, rotary: Rotary, attends: Attends, queries: Asked = None
    ) -> Tensor:
        """The state that is fed back and, after `norm` unless it is normed, read by the head."""
        last = len(self.layers) - 1
        asked = queries if last == 0 else None
        state = self.layers[0].run(attends[0], asked, rotary, embeds.to(state.dtype), state)
        for i in range(1, last + 1):
            state = self.layers[i](state, rotary, attends[i], queries if i == last else None)
        return self.norm(state) if self.config.norm_output else state

    def head(self, hidden: Tensor, depth: int = 0) -> Tensor:
        """[N, H] states as `run` returns them -> [N, V_draft]."""
        return self.lm_head(hidden if self.config.norm_output else self.norm(hidden))

    @override
    def head_parameters(self) -> list[nn.Parameter]:
        parameters = list(self.lm_head.parameters())
        if not self.config.norm_output:
            parameters += self.norm.parameters()
        return [p for p in parameters if p.requires_grad]
