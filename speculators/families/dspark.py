"""DSpark (arXiv 2607.05147): a DFlash block whose drafts depend on the draft before them, with a
confidence head.

The logits of a slot are those of the block plus a low-rank bias of the token before it, y: W2 e
with e = W1[y], the `vanilla` Markov head, which all engines run. The confidence head
σ(w·[h; e] + b) is trained on the probability that the draft is accepted, Σ min(p, q). One forward
serves all slots; drawing them is what remains sequential. Tensor names are those of vLLM's loader.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from pydantic import BaseModel, Field
from torch import Tensor, nn
from typing_extensions import override

from draftsmith.speculators.families.dflash import DFlash, DFlashConfig, DFlashOptions
from draftsmith.speculators.families.least_squares import reduced_rank, ridge, unit
from draftsmith.speculators.target.target_head import TargetHead


class DSparkShape(BaseModel):
    """The Markov head and the confidence head."""

    sample_from_anchor: bool = Field(
        True, description="true: a slot predicts the token after its own position; false: fill_in"
    )
    markov_rank: int = Field(256, ge=1, description="rank of the bias of the token before")
    enable_confidence_head: bool = Field(
        True, description="a head for the probability that a draft is accepted"
    )
    confidence_head_with_markov: bool = Field(
        True, description="that head reads the token before, too"
    )


class DSparkConfig(DSparkShape, DFlashConfig):
    """The block, its Markov head and its confidence head."""

    markov_head_type: Literal["vanilla"] = "vanilla"

    @override
    def describe(self) -> str:
        return f"{super().describe()}; Markov head of rank {self.markov_rank}"


class DSparkOptions(DSparkShape, DFlashOptions):
    """The trained head. Sizes left null are the target's own."""

    block_size: int = Field(
        7, ge=2, description="slots of a block, the anchor's included; each gives a draft"
    )
    confidence_loss: float = Field(
        1.0, ge=0, description="weight of the confidence head's cross-entropy beside `loss`"
    )


class DSpark(DFlash):
    """`head` reads [h; W1[y]]."""

    config_class = DSparkConfig
    options = DSparkOptions
    traits = replace(
        DFlash.traits,
        reads_drafts=True,
        starts_from=("dflash",),
        defaults={
            # 0.9 Σ|p - q|, which is twice the total variation
            "loss": {"cross_entropy": 0.1, "tv": 1.8},
            "position_weights": {"gamma": 4.0},
            "training": {"learning_rate": 6e-4},
        },
    )

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__(config)
        rank = config.markov_rank
        before = nn.Embedding(config.vocab_size, rank)
        bias = nn.Linear(rank, config.draft_vocab_size, bias=False)
        self.markov_head = nn.ModuleDict({"markov_w1": before, "markov_w2": bias})
        if config.enable_confidence_head:
            width = config.hidden_size + rank * config.confidence_head_with_markov
            self.confidence_head = nn.ModuleDict({"proj": nn.Linear(width, 1)})

    @override
    @property
    def vocabulary_heads(self) -> list[nn.Linear]:
        """DFlash's, and the one of the bias by the token before."""
        return [*super().vocabulary_heads, self.markov_head.markov_w2]

    @override
    @property
    def read_width(self) -> int:
        return self.config.hidden_size + self.config.markov_rank

    @override
    def prepare_training(self, options: DSparkOptions) -> DSpark:
        weight = options.confidence_loss if self.config.enable_confidence_head else 0.0
        self.traits = replace(self.traits, confidence_loss=weight)
        return super().prepare_training(options)

    @torch.no_grad()
    def start_weights(self, target: TargetHead) -> None:
        """As DFlash; the bias starts small, the confidence head at one half."""
        super().start_weights(target)
        nn.init.normal_(self.markov_head.markov_w1.weight, std=0.02)
        nn.init.normal_(self.markov_head.markov_w2.weight, std=0.02)
        if self.config.enable_confidence_head:
            nn.init.zeros_(self.confidence_head.proj.weight)
            nn.init.zeros_(self.confidence_head.proj.bias)

    def start_reading(self, target: TargetHead, token_ids: Tensor, left: Tensor) -> None:
        """The bias becomes the target's head on the best linear map from the embedding of the token
        before to `left`, at the bias's rank."""
        embeds = unit(target.embed_tokens(token_ids).float())
        rank = self.config.markov_rank
        basis, written = reduced_rank(embeds, ridge(embeds, left), rank)  # [H_t, r], [r, H]
        first = self.markov_head.markov_w1.weight
        second = self.markov_head.markov_w2.weight
        every = torch.arange(self.config.vocab_size, device=first.device)
        rows = target.head_weight
        rows = rows[self.target_ids] if self.config.reduced_vocabulary else rows[: len(second)]
        if target.final_norm_weight is not None:
            rows = rows * target.final_norm_weight
        read = unit(target.embed_tokens(every).float()) @ basis  # [V, r]
        bias = rows @ written.T  # [V_draft, r]
        ratio = read.square().mean() / bias.square().mean().clamp_min(1e-12)
        balance = ratio**0.25  # both of one size
        first[:, : read.shape[1]] = read / balance
        second[:, : bias.shape[1]] = bias * balance

    @override
    def read(self, state: Tensor, token_ids: Tensor) -> Tensor:
        return torch.cat([state, self.markov_head.markov_w1(token_ids)], -1)

    @override
    def head(self, hidden: Tensor, depth: int = 0, base: Tensor | None = None) -> Tensor:
        if base is None:
            base = self.base_logits(hidden[..., : self.config.hidden_size])
        bias = self.markov_head.markov_w2(hidden[..., -self.config.markov_rank :])
        return base + bias.to(base.dtype)

    @override
    def head_parameters(self) -> list[nn.Parameter]:
        return [*super().head_parameters(), self.markov_head.markov_w2.weight]

    def confidence(self, hidden: Tensor) -> Tensor | None:
        """See `Drafter.confidence`."""
        if not self.config.enable_confidence_head:
            return None
        proj = self.confidence_head.proj
        x = hidden[..., : proj.in_features].float()
        with torch.autocast(x.device.type, enabled=False):  # which would round it to bfloat16
            return nn.functional.linear(x, proj.weight.float(), proj.bias.float()).squeeze(-1)
