"""The MLP speculator (arXiv 2404.19124): a recurrence over the drafted tokens that starts from the
last hidden state.

State i mixes the state before it with an embedding of the newest token, and a vocabulary projection
of its own reads it:

    s_i = gelu(norm_i(w · P_i s_{i-1} + v · E_i[x_{t+1+i}])),   logits_i = U_i s_i,   s_{-1} = h_t

with w = 2^(-1/(2n)) and v = sqrt((1 - w²) · width / 2) for n heads, so that h_t still makes up half
of the last state. Slots do not attend to one another, and nothing is shared with the target. Tensor
names are those of IBM's `MLPSpeculatorPreTrainedModel`, without its prefix; tensors that are tied
are kept once."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from typing_extensions import override

from draftsmith.speculators.config import DrafterConfig
from draftsmith.speculators.drafter import Samples
from draftsmith.speculators.families.attention_free import SlotwiseDrafter
from draftsmith.speculators.layers.decoder import RMSNorm
from draftsmith.speculators.layers.kept_bytes import EXACT, Batch
from draftsmith.speculators.options import PositiveInt, VocabularyOptions
from draftsmith.speculators.target.target_head import TargetHead

EPS = 1e-6  # of the published norms; their config.json has no field for it


class MLPConfig(DrafterConfig):
    """Heads and width; `inner_dim` is the published name of `hidden_size`."""

    n_predict: int = Field(3, ge=1, description="heads, one per drafted token")
    inner_dim: int = Field(ge=1, description="width of the state and of the embeddings")
    tie_weights: bool = Field(
        False, description="all heads share their tensors, but for the first projection"
    )
    scale_input: bool = Field(
        False, description="bring the target's state to a root mean square of sqrt(1/2)"
    )

    @model_validator(mode="before")
    @classmethod
    def _one_width(cls, fields: Any) -> Any:
        width = fields.get("inner_dim") or fields.get("hidden_size")
        return {**fields, "inner_dim": width, "hidden_size": width}

    @override
    @property
    def max_drafts(self) -> int:
        """A token for each head."""
        return self.n_predict

    @override
    def describe(self) -> str:
        named = [name for name in ("tie_weights", "scale_input") if getattr(self, name)]
        return "; ".join([f"{self.n_predict} heads, {self.inner_dim} wide", *named])


class MLPOptions(VocabularyOptions):
    """The trained head. Its first projection reads the target's last hidden state."""

    n_predict: PositiveInt = Field(
        3, description="heads, each for one depth; no more tokens are drafted in a round"
    )
    inner_dim: PositiveInt | None = Field(
        None, description="width of the state, the embeddings and the heads; null: the target's"
    )
    tie_weights: bool = Field(
        True, description="all depths share one embedding, head, norm and later projection"
    )
    scale_input: bool = Field(
        True, description="norm the target's state first; targets differ in how large theirs are"
    )
    unroll_steps: PositiveInt = Field(
        3, description="depths trained; if not given, n_predict: all of them"
    )

    @override
    @classmethod
    def all_depths(cls, section: dict[str, Any]) -> Any:
        return section.get("n_predict")

    @model_validator(mode="after")
    def _heads_there_are(self) -> Self:
        if self.unroll_steps > self.n_predict:
            raise ValueError(
                f"unroll_steps ({self.unroll_steps}) is above n_predict ({self.n_predict}), the"
                " number of heads"
            )
        if self.init_from is not None and "n_predict" not in self.model_fields_set:
            raise ValueError("n_predict: say how many heads the drafter of init_from has")
        return self


class ShiftedRMSNorm(RMSNorm):
    """RMSNorm with a bias; the mean is not subtracted."""

    def __init__(self, width: int) -> None:
        super().__init__(width, eps=EPS)
        self.bias = nn.Parameter(torch.zeros(width))

    @override
    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> the same, in the precision of x."""
        return super().forward(x) + self.bias.to(x.dtype)


class MLPSpeculator(SlotwiseDrafter):
    """`n_predict` heads in a row; tied ones are the same modules."""

    config_class = MLPConfig
    options = MLPOptions
    traits = replace(
        SlotwiseDrafter.traits,
        defaults={
            "position_weights": {"uniform": True},
            "training": {"learning_rate": 1e-3, "weight_decay": 0.1, "max_grad_norm": 1.0},
            "evaluation": {"num_speculative_tokens": 3},
        },
        short_training={"learning_rate": 5e-3, "warmup_ratio": 0.04},
    )

    def __init__(self, config: MLPConfig) -> None:
        super().__init__(config)
        # Where the vocabulary projections are tied, the loss takes all depths at once.
        self.traits = replace(self.traits, one_head=config.tie_weights)
        width = config.inner_dim
        vocabulary = config.vocab_size
        copies = 1 if config.tie_weights else config.n_predict
        later = min(copies, config.n_predict - 1)
        self.emb = nn.ModuleList(nn.Embedding(vocabulary, width) for _ in range(copies))
        self.proj = nn.ModuleList(
            nn.Linear(size, width, bias=False)
            for size in (config.target_hidden_size, *[width] * later)
        )
        self.ln = nn.ModuleList(ShiftedRMSNorm(width) for _ in range(copies))
        self.heads = nn.ModuleList(
            nn.Linear(width, config.draft_vocab_size, bias=False) for _ in range(copies)
        )
        self.state_weight = 0.5 ** (0.5 / config.n_predict)
        self.emb_weight = math.sqrt((1 - self.state_weight**2) * width / 2)

    @override
    @property
    def vocabulary_heads(self) -> list[nn.Linear]:
        """One for each depth, or one for all."""
        return list(self.heads)  # type: ignore[arg-type]

    @override
    def state_bytes(self, batch: Batch) -> int:
        return batch.depths * batch.tokens * EXACT * self.config.inner_dim

    @override
    def kept_bytes(self, batch: Batch) -> int:
        """Of each depth the state before, cast for its product, what is normed and what `gelu`
        reads, and the state after it, that the loss reads, in float32. Recomputed, two states, and
        one depth."""
        state = batch.tokens * self.config.inner_dim
        depth = state * (batch.size + 3 * EXACT)
        if batch.recomputes:
            return 2 * self.state_bytes(batch) + depth
        return batch.depths * depth

    @torch.no_grad()
    def initialise_from(
        self, target: TargetHead, options: Any = None, features: Samples = None
    ) -> MLPSpeculator:
        """The published start, whose scale the weights presume: deviation 1/sqrt(width)."""
        for module in (*self.emb, *self.proj, *self.heads):
            nn.init.trunc_normal_(module.weight, std=self.config.inner_dim**-0.5)
        return self

    # -------------------------------------------------------------- shared by training and drafting

    def start(self, last_hidden: Tensor) -> Tensor:
        """[N, H], scaled if so configured."""
        state = super().start(last_hidden)
        if not self.config.scale_input:
            return state
        return nn.functional.rms_norm(state, state.shape[-1:], eps=EPS) / math.sqrt(2)

    def advance(self, state: Tensor, token_ids: Tensor, depth: int) -> Tensor:
        """s_{depth-1} [N, H or width] and tokens [N] -> s_depth [N, width]."""
        mixed = self.state_weight * _of(self.proj, depth)(state)
        mixed = mixed + self.emb_weight * _of(self.emb, depth)(token_ids)
        return nn.functional.gelu(_of(self.ln, depth)(mixed))

    def head(self, hidden: Tensor, depth: int = 0) -> Tensor:
        """[N, width] -> [N, V_draft]."""
        return _of(self.heads, depth)(hidden)

    @override
    def head_parameters(self) -> list[nn.Parameter]:
        return [p for p in self.heads.parameters() if p.requires_grad]


def _of(modules: nn.ModuleList, depth: int) -> nn.Module:
    """The module of a depth; the last one serves all further depths, as tied ones are kept."""
    return modules[min(depth, len(modules) - 1)]
