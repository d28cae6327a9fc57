"""Medusa (arXiv 2401.10774): independent heads on the target's last hidden state.

Head k reads h_t, the state that gave x_{t+1}, through residual SiLU blocks x + silu(W x + b), and
projects it onto the vocabulary: x_{t+2+k}. Medusa-1 trains them against the frozen target; with a
recipe's `joint:` section the target gets a LoRA that is trained jointly (Medusa-2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from pydantic import BaseModel, Field
from torch import Tensor, nn
from typing_extensions import override

from draftsmith.speculators.config import DrafterConfig
from draftsmith.speculators.drafter import Samples, valid_terms
from draftsmith.speculators.families.attention_free import SlotwiseDrafter
from draftsmith.speculators.families.least_squares import fit_bytes, fit_flops, ridge, terms_for
from draftsmith.speculators.layers.kept_bytes import EXACT, Batch
from draftsmith.speculators.options import PositiveInt, VocabularyOptions
from draftsmith.speculators.target.frozen_target import TargetFeatures
from draftsmith.speculators.target.target_head import TargetHead


class MedusaShape(BaseModel):
    """How many heads, and what each is."""

    num_heads: int = Field(5, ge=1, description="heads, each drafts one token")
    num_layers: int = Field(1, ge=1, description="residual blocks of a head")
    fc_bias: bool = Field(True, description="the blocks have a bias, as the published heads have")
    shared_lm_head: bool = Field(
        False, description="one vocabulary projection for all heads, which is most of their size"
    )


class MedusaConfig(MedusaShape, DrafterConfig):
    """The heads."""

    @property
    def projections(self) -> int:
        """Output projections: one for each head, or one that all share."""
        return 1 if self.shared_lm_head else self.num_heads

    @override
    @property
    def max_drafts(self) -> int:
        """A token for each head."""
        return self.num_heads

    @override
    def describe(self) -> str:
        heads = f"{self.num_heads} heads of {self.num_layers} block(s)"
        return f"{heads}, {self.projections} vocabulary projection(s)"


class MedusaOptions(MedusaShape, VocabularyOptions):
    """The trained heads."""

    unroll_steps: PositiveInt = Field(5, description="heads trained; never more than there are")
    init: Literal["target", "least_squares"] = Field(
        "target", description="projections start as the target's, or fitted to some training rows"
    )


class ResidualBlock(nn.Module):
    """x + silu(W x + b)."""

    def __init__(self, width: int, bias: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=bias)

    @override
    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> the same."""
        return x + nn.functional.silu(self.linear(x))


class Medusa(SlotwiseDrafter):
    """The state is the target's at every depth; what a head reads of it is its blocks'."""

    config_class = MedusaConfig
    options = MedusaOptions
    traits = replace(
        SlotwiseDrafter.traits,
        reads_drafts=False,
        defaults={"training": {"learning_rate": 1e-3}},
    )

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__(config)
        width = config.hidden_size
        self.blocks = nn.ModuleList(
            nn.Sequential(*(ResidualBlock(width, config.fc_bias) for _ in range(config.num_layers)))
            for _ in range(config.num_heads)
        )
        self.lm_heads = nn.ModuleList(
            nn.Linear(width, config.draft_vocab_size, bias=False) for _ in range(config.projections)
        )

    @override
    @property
    def vocabulary_heads(self) -> list[nn.Linear]:
        """One for each depth, or one for all."""
        return list(self.lm_heads)  # type: ignore[arg-type]

    @override
    def start_terms(self, options: MedusaOptions) -> int:
        return terms_for(self.config.hidden_size) if options.init == "least_squares" else 0

    @override
    def start_bytes(self, options: MedusaOptions, terms: int) -> int:
        """Of each term a state and the one that it becomes, twice; of all heads together if they
        share their projection."""
        width = self.config.hidden_size
        pairs = self.config.num_heads if self.config.shared_lm_head else 1
        return fit_bytes(terms, 4 * pairs * width, width)

    @override
    def start_flops(self, options: MedusaOptions, terms: int) -> int:
        """A regression for each depth, or one of the terms of all, that a projection follows."""
        width = self.config.hidden_size
        regressions = self.config.num_heads * fit_flops(terms, width, width)
        return regressions + sum(2 * width * head.weight.numel() for head in self.lm_heads)

    @override
    def state_bytes(self, batch: Batch) -> int:
        return batch.depths * batch.tokens * EXACT * self.config.hidden_size

    @override
    def kept_bytes(self, batch: Batch) -> int:
        """Of each block what its product reads and gives, and the sum, in float32. Recomputed, of
        each head the state that it reads and the one it gives, and the blocks of one."""
        config = self.config
        state = batch.tokens * config.hidden_size
        head = state * config.num_layers * (2 * batch.size + EXACT)
        if batch.recomputes:
            return 2 * self.state_bytes(batch) + head
        return batch.depths * head

    @torch.no_grad()
    def initialise_from(
        self, target: TargetHead, options: Any = None, features: Samples = None
    ) -> Medusa:
        """Blocks begin as the identity and projections as the target's, or with `features` as the
        target's after the ridge regression of the state of t + 1 + k on that of t."""
        for blocks in self.blocks:
            for block in blocks:
                nn.init.zeros_(block.linear.weight)
                if block.linear.bias is not None:
                    nn.init.zeros_(block.linear.bias)
        rows = target.head_weight
        if (ids := self.draft_to_target) is not None:
            rows = rows[ids.to(rows.device)]
        for depth, head in enumerate(self.lm_heads):
            head.weight.copy_(rows)
            if features is not None:
                head.weight.copy_(head.weight @ self._next_state(features, depth).T)
        return self

    def _next_state(self, features: Sequence[TargetFeatures], depth: int) -> Tensor:
        """[H, H]: from a slot's state to the one that `depth` (if shared: any) must match."""
        states = []
        outputs = []
        for f in features:
            for k in range(self.config.num_heads) if self.config.shared_lm_head else (depth,):
                rows, slots = valid_terms(f, k + 2).nonzero(as_tuple=True)
                states.append(f.last_hidden[rows, slots].float())
                outputs.append(f.last_hidden[rows, slots + k + 1].float())
        return ridge(torch.cat(states), torch.cat(outputs))

    def read(self, state: Tensor, depth: int) -> Tensor:
        """Head `depth`'s blocks: [N, H] -> [N, H]."""
        return self.blocks[depth](state)

    def head(self, hidden: Tensor, depth: int = 0) -> Tensor:
        """[N, H] -> [N, V_draft]."""
        return self.lm_heads[min(depth, len(self.lm_heads) - 1)](hidden)

    @override
    def head_parameters(self) -> list[nn.Parameter]:
        return [p for p in self.lm_heads.parameters() if p.requires_grad]
