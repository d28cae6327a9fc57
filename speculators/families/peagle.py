"""P-EAGLE (arXiv 2602.01469): an EAGLE-3 head that drafts all of its tokens in one forward.

Depth 0 is EAGLE-3's. Where a deeper depth of EAGLE-3 reads a drafted token and its own state, this
head reads a mask token's embedding and one learnt state, `mask_hidden`, so that no depth waits for
another. Training unrolls chains of which deeper depths keep fewer, nested within each other: depth
d keeps max(ratio^d, floor) of the row's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn
from typing_extensions import override

from draftsmith.speculators.drafter import DraftInput, DraftLogits, DraftSteps, Grow, row_noise
from draftsmith.speculators.families.eagle3 import Eagle3, Eagle3Config, Eagle3Options
from draftsmith.speculators.layers.int8_linear import dtype_of
from draftsmith.speculators.options import Count, PositiveInt, Share
from draftsmith.speculators.precision import on_device


class PEagleConfig(Eagle3Config):
    """EAGLE-3's head, and what a slot without a known token holds."""

    num_depths: int = Field(ge=1, description="depths trained, and tokens drafted at most")
    mask_token_id: int = Field(ge=0, description="token whose embedding fills unknown slots")

    @override
    @property
    def max_drafts(self) -> int:
        """A token for each depth of its forward."""
        return self.num_depths

    @override
    def describe(self) -> str:
        return f"{super().describe()}; {self.num_depths} depths in one forward"


class PEagleOptions(Eagle3Options):
    """The trained head. Sizes left null are the target's own."""

    num_depths: PositiveInt = Field(8, description="depths trained, and tokens drafted at most")
    unroll_steps: PositiveInt = Field(8, description="depths trained; left out, all of num_depths")
    mask_token_id: Count | None = Field(
        None, description="token for unknown slots; null: a mask token, or an unused row"
    )
    own_embeddings: bool = Field(
        True, description="train a copy of the target's embeddings, the mask token's too"
    )
    cod_ratio: Share = Field(
        0.7, description="share of the chains that each further depth keeps in training"
    )
    cod_floor: Share = Field(0.2, description="the smallest share of chains that a depth keeps")

    @override
    @classmethod
    def all_depths(cls, section: dict[str, Any]) -> Any:
        return section.get("num_depths")


class PEagle(Eagle3):
    """Slots of unknown tokens hold [embedding of the mask token; fc(mask_hidden)]."""

    config_class = PEagleConfig
    options = PEagleOptions
    traits = replace(
        Eagle3.traits,
        reads_drafts=False,
        samples_terms=True,
        defaults={"position_weights": {"uniform": True}},
    )

    @override
    @property
    def max_depth(self) -> int:
        """The depths of its forward, as far as they lie within the window."""
        return min(self.config.num_depths, self.window or self.config.num_depths)

    def __init__(self, config: PEagleConfig) -> None:
        super().__init__(config)
        self.mask_hidden = nn.Parameter(torch.randn(self.fc.in_features))
        self.cod_ratio = 1.0
        self.cod_floor = 1.0

    @override
    def prepare_training(self, options: PEagleOptions) -> PEagle:
        self.cod_ratio = options.cod_ratio
        self.cod_floor = options.cod_floor
        return self

    # -------------------------------------------------------------- training

    def terms(self, batch: Any, steps: int) -> list[Tensor]:
        """See `ChainDrafter.terms`. In training a row's slots come in an order drawn from its seed,
        and depth d keeps the first max(ratio^d, floor) of those that have a term at depth 0."""
        valid = super().terms(batch, steps)
        if not self.training or self.cod_ratio == 1:
            return valid
        noise = row_noise(batch).masked_fill_(~valid[0], 2.0)
        rank = noise.argsort(1).argsort(1)  # of every slot in its row's order
        chains = valid[0].sum(1, keepdim=True)
        shares = [max(self.cod_ratio**depth, self.cod_floor) for depth in range(steps)]
        return [v & (rank < (chains * share).ceil()) for v, share in zip(valid, shares)]

    @override
    def share_of_slots(self, depth: int) -> float:
        """At depth 0 all give keys; behind it, the chains that are kept."""
        return max(self.cod_ratio**depth, self.cod_floor)

    @override
    def tokens_read(self, token_ids: Tensor, depth: int) -> Tensor:
        return token_ids if depth == 0 else torch.full_like(token_ids, self.config.mask_token_id)

    def feed_back(self, state: Tensor) -> Tensor:
        """The state of an unknown slot, whatever the depth before made."""
        return self._unknown().to(state.dtype).expand_as(state)

    def _unknown(self) -> Tensor:
        """[H]."""
        return self.fc(self.read_taps(self.mask_hidden.to(dtype_of(self.fc))))

    # -------------------------------------------------------------- inference

    def draft_steps(self, inputs: DraftInput, k: int) -> DraftSteps:
        """See `Drafter.draft_steps`: one forward over the true slots and k - 1 unknown ones."""
        logits = self._all_depths(inputs, k)
        for depth in range(k):
            yield DraftLogits(logits[:, depth])

    def draft_tree(self, inputs: DraftInput, k: int, grow: Grow) -> None:
        """See `Drafter.draft_tree`. Every branch has the distributions of its depth."""
        logits = self._all_depths(inputs, k)
        width = 1
        for depth in range(k):
            if (level := grow(logits[:, depth, None].expand(-1, width, -1))) is None:
                return
            width = level.token_ids.shape[1]

    def _all_depths(self, inputs: DraftInput, k: int) -> Tensor:
        """Appends each row's slots; logits of the newest and k - 1 unknown [b, k, V_draft]."""
        token_ids = inputs.token_ids
        b, M = inputs.token_ids.shape
        true = on_device(inputs.counts, token_ids.device)[:, None]  # [b, 1]
        place = torch.arange(M + k - 1, device=token_ids.device).expand(b, -1)
        known = place < true  # [b, M + k - 1]
        ids = nn.functional.pad(token_ids, (0, k - 1))
        ids = ids.masked_fill(~known, self.config.mask_token_id)
        state = nn.functional.pad(self.first_state(inputs.taps, None), (0, 0, 0, k - 1))
        state = torch.where(known[..., None], state, self._unknown())
        states = self.extend(inputs.cache, inputs.start, inputs.stop, ids, state)
        inputs.advance(inputs.counts)
        slots = true - 1 + torch.arange(k, device=ids.device)  # [b, k]
        chosen = states.gather(1, slots[..., None].expand(-1, -1, states.shape[-1]))
        return self.head(chosen.flatten(0, 1)).unflatten(0, (b, k))
