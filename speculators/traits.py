"""What the training loop and the runtime ask of a drafter by a switch, in one record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# Muon's rate over the weight matrices; AdamW's over the weights that are no matrices.
SHORT_TRAINING: Mapping[str, Any] = {
    "optimizer": "muon",
    "muon_learning_rate": 0.02,
    "learning_rate": 1.5e-3,
    "max_grad_norm": 1.0,
    "warmup_ratio": 0.04,
}


@dataclass(frozen=True)
class Traits:
    """The switches of a drafter.

    A family states those that are not the defaults in its class attribute `traits`. A drafter whose
    config or training options decide over one replaces its own record (`dataclasses.replace`).
    Callers read `drafter.traits.x`, or `Family.traits.x` before a drafter exists.

    What it reads of the target:

    reads_taps         the hidden states of the layers `config.tap_layers`
    reads_last_hidden  the last hidden state, after the final norm unless the family says otherwise

    How it drafts:

    first_token        slot p of its cache holds the token x_{p + first_token}
    reads_drafts       the logits of a depth depend on the tokens drafted before it
    whole_blocks       all depths are one forward, whose states depend on how many there are
    selects_queries    the last layer can leave out the queries of slots whose state nobody reads
                       (families of `ChainDrafter`)
    writes             it generates text without the target, by `Drafter.writer`

    How it is trained:

    one_head           `head` is the same at every depth, so that the loss takes all depths at once
    samples_terms      in training mode `unroll` yields a sample of the valid terms
    confidence_loss    weight of the loss on `Drafter.confidence`; 0: none
    recomputes         the backward pass computes each depth of `unroll` again, to save memory
    starts_from        names of other families whose drafters it can start from
    defaults           published settings of other sections of a recipe, by section
    short_training     the preset `short` of `training:`, over the published values
    """

    reads_taps: bool = False
    reads_last_hidden: bool = False
    first_token: int = 1
    reads_drafts: bool = True
    whole_blocks: bool = False
    selects_queries: bool = True
    writes: bool = False
    one_head: bool = True
    samples_terms: bool = False
    confidence_loss: float = 0.0
    recomputes: bool = False
    starts_from: tuple[str, ...] = ()
    defaults: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    short_training: Mapping[str, Any] = field(default_factory=lambda: SHORT_TRAINING)
